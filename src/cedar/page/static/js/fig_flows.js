// Figures 7 to 10: the four flows on one request, bars on shared scales.

import { bytes, count, percent, seconds } from "cedar/format.js";
import { bar, barHeight, numberSpans, smallMap, valueSpan } from "cedar/parts.js";
import { isMeasured } from "cedar/measured.js";
import { canvas, group, label, svg } from "cedar/svg.js";
import { workOf } from "cedar/fig_prefill.js";
import { workBar } from "cedar/fig_ced.js";

const UNDER = 16;
const MAP = 140;

/** Maker of the drawing of one flow. */
export const drawFlow = (name) => (view, width) => {
  const { t } = view;
  const flow = view.flows[name];
  if (flow.unavailable) {
    const text = t("flow.unavailable", { reason: flow.unavailable });
    return canvas(width, 60, { role: "img", "aria-label": text }, label(0, 30, text, "small muted"));
  }
  const step = barHeight(width, UNDER);
  const place = (i) => ({ x: 0, y: MAP + 16 + i * step, width });
  const measured = view.measured[name] ?? {};
  const [run, all] = workOf(view, flow);
  const bars = [
    workBar(view, flow, place(0), Number(all), t("flows.work")),
    label(width, place(0).y + barHeight(width), t("flows.share", { share: percent(Number(run) / Number(all)), whole: count(all) }), "end tiny muted"),
    activationBar(view, flow, place(1)),
    memoryBar(view, flow, place(2), measured),
    persistedBar(view, flow, place(3), measured),
  ];
  const timed = measured.prefill_seconds !== undefined && measured.decode_seconds !== undefined;
  const height = MAP + 16 + 4 * step + (timed ? 20 : 0);
  const note = timed
    ? label(0, height - 6, t("flows.seconds", { prefill: seconds(measured.prefill_seconds), decode: seconds(measured.decode_seconds) }), "small kind measured")
    : [];
  const spoken = `${t(`flow.${name}`)}. ${summary(view, flow)}`;
  return canvas(width, height, { role: "img", "aria-label": spoken, "data-flow": name },
    smallMap(view, flow, { x: 0, y: 0, width, height: MAP }), bars, note);
};

const maybe = (ledger, name) => (ledger.has(name) ? ledger.number(name) : undefined);

/** Second line of a bar: what the article prints, and what a run measured. */
function under(view, place, quoted, measured, write = bytes) {
  const words = [];
  if (quoted !== undefined) {
    words.push(svg("tspan", { class: "kind quoted" }, `◇ ${view.t("flows.article", { n: write(quoted) })}`));
  }
  if (measured !== undefined) {
    const dx = words.length ? 12 : 0;
    words.push(svg("tspan", { class: "kind measured", dx }, `┃ ${view.t("flows.measured", { n: write(measured) })}`));
  }
  return words.length ? label(place.x, place.y + barHeight(place.width), words, "tiny") : [];
}

function activationBar(view, flow, place) {
  const { ledger } = flow;
  const quote = maybe(ledger, "quoted.prefill_activation");
  const shown = ledger.get("prefill_activation");
  const written = count(Number(shown) >= 1000 ? Math.round(Number(shown)) : shown);
  return group({},
    bar(place, {
      title: view.t("flows.activation"), max: view.largest("prefill_activation"), quote,
      parts: [{ value: Number(shown), kind: "ink" }],
      spans: numberSpans(view, flow, "prefill_activation", `${written} × 10⁹`),
    }),
    under(view, place, quote, undefined, count));
}

function memoryBar(view, flow, place, measured) {
  const { ledger } = flow;
  const quote = maybe(ledger, "quoted.kv_bytes");
  const window = ledger.number("window_bytes");
  return group({},
    bar(place, {
      title: view.t("flows.kv"), max: view.largest("kv_bytes") + window, quote, measured: measured.kv_bytes,
      parts: [{ value: ledger.number("kv_bytes"), kind: "owned" }, { value: window, kind: "window" }],
      spans: [valueSpan(flow, "kv_bytes", bytes(ledger.get("kv_bytes"))), " + ",
        ...numberSpans(view, flow, "window_bytes", bytes(window))],
    }),
    under(view, place, quote, measured.kv_bytes));
}

/** The track is as long as a cache that also keeps windows would be. */
function persistedBar(view, flow, place, measured) {
  const { ledger } = flow;
  const quote = maybe(ledger, "quoted.persisted_bytes");
  // A run without a store says what the store would write: derived, so no measured mark.
  const measuredBytes = isMeasured(measured, "persisted") ? measured.persisted_bytes : undefined;
  const previous = maybe(ledger, "quoted.v4_flash_persisted_bytes");
  const share = view.t("flows.share", { share: percent(ledger.number("store.share")), whole: bytes(ledger.get("store.baseline_bytes")) });
  return group({},
    bar(place, {
      title: view.t("flows.persisted"), max: view.largest("store.baseline_bytes"), quote: quote ?? previous,
      measured: measuredBytes,
      parts: [{ value: ledger.number("persisted_bytes"), kind: "owned" }],
      spans: numberSpans(view, flow, "persisted_bytes", bytes(ledger.get("persisted_bytes"))),
    }),
    label(place.x + place.width, place.y + barHeight(place.width), share, "end tiny muted"),
    previous === undefined
      ? under(view, place, quote, measuredBytes)
      : label(place.x, place.y + barHeight(place.width), `◇ ${view.t("flows.previous", { n: bytes(previous) })}`, "tiny kind quoted"));
}

function summary(view, flow) {
  const { ledger } = flow;
  const { t } = view;
  return [
    `${t("flows.activation")}: ${count(ledger.get("prefill_activation"))} ${t("unit.activation")}`,
    `${t("flows.kv")}: ${bytes(ledger.get("kv_bytes"))} + ${bytes(ledger.get("window_bytes"))}`,
    `${t("flows.persisted")}: ${bytes(ledger.get("persisted_bytes"))}`,
  ].join(". ");
}

/** What is left of reading and memory, against the flow with neither idea. */
export const captionFlow = (name) => (view) => {
  const flow = view.flows[name];
  if (flow.unavailable) return "";
  const [run, all] = workOf(view, flow);
  const { ledger } = flow;
  return view.t(`fig${7 + view.data.flows.indexOf(name)}.caption`, {
    reading: percent(Number(run) / Number(all)),
    memory: percent(ledger.number("kv_bytes") / view.flows.none.ledger.number("kv_bytes")),
    disk: percent(ledger.number("store.share")),
  });
};
