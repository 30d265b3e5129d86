// Figure 4: what one decode step reads in each layer, and what it scores to choose.

import { count } from "cedar/format.js";
import { layerGroup } from "cedar/parts.js";
import { canvas, label, rect } from "cedar/svg.js";

const TOP = 52;

export function draw(view, width) {
  const { flow, t } = view;
  const sides = [["encoder", flow.encoder], ["decoder", flow.decoder]].filter(([, layers]) => layers.length);
  const wide = width >= 700;
  const gap = 48;
  const panel = wide ? (width - gap * (sides.length - 1)) / sides.length : width;
  const most = Math.max(...flow.layers.map((layer) => layer.number("read_window") + layer.number("read_selected")));
  const rows = Math.max(...sides.map(([, layers]) => layers.length));
  const step = rows > 12 ? 17 : 28;
  let y = 0;
  const parts = sides.map(([side, layers], i) => {
    const x = wide ? i * (panel + gap) : 0;
    const top = wide ? 0 : y;
    y = top + TOP + layers.length * step + 8;
    const base = wide ? TOP + rows * step : top + TOP + layers.length * step;
    return [head(view, side, layers, x, base - layers.length * step, panel), layers.map((layer, j) =>
      row(view, layer, { x, y: base - (j + 1) * step, width: panel, height: step, most }))];
  });
  const height = wide ? TOP + rows * step + 6 : y;
  return canvas(width, height, { role: "group", "aria-label": t("fig4.title") }, parts);
}

const KEYS = 74;
const IDS = 30;

function head(view, side, layers, x, base, width) {
  const { t } = view;
  const range = t("fig1.layers", { from: layers[0].id, to: layers.at(-1).id });
  return [
    label(x, base - 30, t(`fig1.${side}`), `strong ${side}`),
    label(x + width, base - 30, range, "end small muted"),
    label(x + IDS, base - 8, t("fig4.rows"), "tiny muted"),
    label(x + width, base - 8, t("fig4.keys"), "end tiny muted"),
  ];
}

function row(view, layer, { x, y, width, height, most }) {
  const [h, middle] = [height - 5, y + height / 2 + 4];
  const room = width - IDS - KEYS;
  const window = (layer.number("read_window") / most) * room;
  const selected = (layer.number("read_selected") / most) * room;
  const scored = layer.get("scored");
  return layerGroup(view, layer,
    rect(x, y, width, height, "hit"),
    label(x + IDS - 10, middle, layer.id, "end tiny muted"),
    rect(x + IDS, y + 2.5, window, h, "window"),
    selected ? rect(x + IDS + window, y + 2.5, selected, h, `kv ${layer.owns ? "owned" : "borrowed"}`) : null,
    scored ? label(x + width, middle, count(scored), "end small kv-word") : null,
  );
}

export function caption(view) {
  const { flow, t } = view;
  return t("fig4.caption", {
    total: count(flow.ledger.get("total_tokens")), window: count(flow.layers[0].get("read_window")),
    topk: count(flow.ledger.get("model.index_topk")), scored: count(flow.sum(flow.layers, "scored")),
  });
}
