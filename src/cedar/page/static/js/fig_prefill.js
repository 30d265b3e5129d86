// Figure 3: the prefill as a map, tokens across and layers up. Area is work.

import { count, percent } from "cedar/format.js";
import { kvKind, layerGroup, mapRow, rowsOf, tailOf, TokenAxis } from "cedar/parts.js";
import { canvas, label, rect, svg } from "cedar/svg.js";

const TOP = 26;

export function draw(view, width) {
  const { t, flow } = view;
  const wide = width >= 700;
  const [left, right] = wide ? [96, 60] : [26, 34];
  const tall = flow.layers.length > 16 ? Math.max(360, flow.layers.length * 11) : flow.layers.length * 28;
  const height = TOP + tall + 34;
  const tokens = view.state.input_tokens;
  const axis = new TokenAxis(left, width - left - right, tokens, tailOf(view));
  const rows = rowsOf(flow, TOP, tall, 8);
  const every = flow.layers.length > 16 ? 5 : 1;
  const [kvX, kvWidth] = [width - right + 8, wide ? 24 : 12];
  const parts = rows.map(({ layer, y, height: h }) => layerGroup(view, layer,
    rect(0, y - 0.5, width, h + 1, "hit"),
    layer.id % every === 0 ? label(left - 8, y + h / 2 + 3.5, layer.id, "end tiny muted") : null,
    mapRow(axis, layer, { y, height: h }),
    rect(kvX, y, kvWidth, h, `kv ${kvKind(layer)}`),
    rect(kvX + kvWidth + 3, y, wide ? 10 : 6, h, "window"),
  ));
  return canvas(width, height, { role: "group", "aria-label": t("fig3.title") },
    parts, sides(view, rows, wide), axisLabels(view, axis, height), cutLine(view, rows, left, width - right),
    label(kvX + (kvWidth + 13) / 2, TOP - 9, t("fig3.stored"), "middle tiny muted"),
    notRun(view, axis, rows));
}

/** Names of the two halves, each centred on its rows. */
function sides(view, rows, wide) {
  if (!wide) return [];
  return ["encoder", "decoder"].flatMap((side) => {
    const own = rows.filter(({ layer }) => layer.side === side);
    if (!own.length) return [];
    const [high, low] = [own.at(-1).y, own[0].y + own[0].height];
    return [label(0, (high + low) / 2 + 4, view.t(`fig1.${side}`), `strong ${side}`),
      rect(88, high, 0, low - high, side)];
  });
}

function axisLabels(view, axis, height) {
  const { t } = view;
  const y = height - 12;
  if (!axis.broken) return [label(axis.x + axis.width / 2, y, t("fig3.all", { n: count(axis.tokens) }), "middle small muted")];
  const slash = (x) => svg("path", { class: "line break", d: `M${x - 2} ${y - 16}l4 -8` });
  return [
    label(axis.x + axis.headWidth / 2, y, t("fig3.first", { n: count(axis.tokens - axis.tail) }), "middle small muted"),
    label(axis.x + axis.width, y, t("fig3.last", { n: count(axis.tail) }), "end small muted"),
    slash(axis.x + axis.headWidth + axis.gap * 0.3), slash(axis.x + axis.headWidth + axis.gap * 0.8),
  ];
}

function cutLine(view, rows, from, to) {
  const first = rows.find(({ layer }) => layer.side === "decoder");
  if (!first) return [];
  const y = first.y + first.height + 4;
  return [svg("path", { class: "line cut", d: `M${from - 22} ${y}H${to + 4}` })];
}

/** How much is left out, written into the empty area. */
function notRun(view, axis, rows) {
  const { flow, t } = view;
  const idle = view.state.input_tokens * flow.decoder.length - flow.ledger.number("decoder_token_layers");
  if (idle <= 0 || !axis.broken) return [];
  const own = rows.filter(({ layer }) => layer.side === "decoder");
  const y = (own[0].y + own[0].height + own.at(-1).y) / 2;
  return [label(axis.x + axis.headWidth / 2, y + 5, t("fig3.idle", { n: count(idle) }), "middle halo muted")];
}

/** Token-layers of the prefill of a flow: [run, all]. */
export function workOf(view, flow) {
  const run = BigInt(flow.ledger.get("encode_token_layers")) + BigInt(flow.ledger.get("decoder_token_layers"));
  return [run, BigInt(view.state.input_tokens) * BigInt(flow.layers.length)];
}

export function caption(view) {
  const { flow, t } = view;
  const [run, all] = workOf(view, flow);
  const tail = tailOf(view);
  const axis = new TokenAxis(0, 1000, view.state.input_tokens, tail);
  const more = [
    flow.ced && flow.ledger.number("phases.project.layers") && t("fig3.more.ced"),
    axis.broken && t("fig3.more.broken", { tail: count(tail) }),
  ].filter(Boolean).join("");
  return t("fig3.caption", { run: count(run), all: count(all), share: percent(Number(run) / Number(all)), more });
}
