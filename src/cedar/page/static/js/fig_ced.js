// Figure 5: the same prefill with CED off and on.

import { count, flops, parameters, percent } from "cedar/format.js";
import { bar, barHeight, numberSpans, smallMap, tailOf, valueSpan } from "cedar/parts.js";
import { canvas, group, label } from "cedar/svg.js";
import { workOf } from "cedar/fig_prefill.js";

export function draw(view, width) {
  const { t } = view;
  const wide = width >= 640;
  const flows = [view.withCed(false), view.withCed(true)];
  const gap = 56;
  const panel = wide ? (width - gap) / 2 : width;
  const map = wide ? 200 : 150;
  const tall = 30 + map + 14 + 3 * barHeight(panel);
  const parts = flows.map((flow, i) => {
    const x = wide ? i * (panel + gap) : 0;
    const y = wide ? 0 : i * (tall + 26);
    return half(view, flow, { x, y, width: panel, map });
  });
  return canvas(width, wide ? tall : 2 * tall + 26, { role: "img", "aria-label": `${t("fig5.title")}. ${caption(view)}` }, parts);
}

function half(view, flow, { x, y, width, map }) {
  const { t } = view;
  const title = label(x, y + 16, t(flow?.ced ? "fig5.on" : "fig5.off"), "strong");
  if (flow.unavailable) {
    return group({}, title, label(x, y + 44, t("flow.unavailable", { reason: flow.unavailable }), "small muted"));
  }
  const { ledger } = flow;
  const [, all] = workOf(view, flow);
  const place = (i) => ({ x, y: y + 44 + map + i * barHeight(width), width });
  const ink = (name) => [{ value: ledger.number(name), kind: "ink" }];
  return group({ "data-flow": flow.name },
    title,
    smallMap(view, flow, { x, y: y + 30, width, height: map }),
    workBar(view, flow, place(0), Number(all)),
    bar(place(1), {
      title: t("fig5.flops"), parts: ink("flops.prefill.total"), max: view.largest("flops.prefill.total"),
      spans: numberSpans(view, flow, "flops.prefill.total", flops(ledger.get("flops.prefill.total"), view.smallest("flops.prefill.total"))),
    }),
    bar(place(2), {
      title: t("fig5.activated"), parts: ink("activated_prefill"), max: view.largest("activated_prefill"),
      spans: numberSpans(view, flow, "activated_prefill", parameters(ledger.get("activated_prefill"))),
    }),
  );
}

/** Token-layers of the prefill, encoder and decoder. */
export function workBar(view, flow, place, max, title = view.t("fig5.work")) {
  const { ledger } = flow;
  return bar(place, {
    title, max,
    parts: [
      { value: ledger.number("encode_token_layers"), kind: "work encoder" },
      { value: ledger.number("decoder_token_layers"), kind: "work decoder" },
    ],
    spans: [
      valueSpan(flow, "encode_token_layers", count(ledger.get("encode_token_layers"))), " + ",
      ...numberSpans(view, flow, "decoder_token_layers", count(ledger.get("decoder_token_layers"))),
    ],
  });
}

export function caption(view) {
  const [off, on] = [view.withCed(false), view.withCed(true)];
  if (on.unavailable) return view.t("flow.unavailable", { reason: on.unavailable });
  const spent = on.ledger.number("flops.prefill.total") / off.ledger.number("flops.prefill.total");
  return view.t("fig5.caption", {
    tail: count(tailOf(view)), input: count(view.state.input_tokens), saved: percent(1 - spent),
  });
}
