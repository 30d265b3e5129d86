// Figure 6: layers in groups that share KV rows; lanes for rows, selection and windows.

import { count } from "cedar/format.js";
import { kvKind, layerGroup } from "cedar/parts.js";
import { canvas, diamond, group, label, rect } from "cedar/svg.js";

const LANES = { layer: 28, kv: 24, topk: 12, window: 10 };
const GAP = 5;
const ROW = LANES.layer + LANES.kv + LANES.topk + LANES.window + 4 * GAP + 28;

/** Groups laid out in lines, a new one at the cut; a group wider than a line is split. */
function arrange(groups, cell, width, space) {
  const most = Math.max(1, Math.floor(width / cell + 0.01));
  const pieces = groups.flatMap((layers) => {
    const parts = [];
    for (let i = 0; i < layers.length; i += most) parts.push(layers.slice(i, i + most));
    return parts;
  });
  const placed = [];
  let [x, line] = [0, 0];
  for (const layers of pieces) {
    const room = layers.length * cell;
    const cut = placed.length > 0 && placed.at(-1).layers[0].side !== layers[0].side;
    if (x > 0 && (cut || x + room > width + 0.5)) [x, line] = [0, line + 1];
    placed.push({ layers, x, line });
    x += room + space;
  }
  return { placed, lines: line + 1 };
}

/** Cells as wide as one line for each side allows, or else as a finger needs. */
function cellWidth(groups, width, space) {
  const sides = ["encoder", "decoder"].map((side) => groups.filter(([first]) => first.side === side));
  const fitting = sides.filter((own) => own.length).map((own) =>
    (width - (own.length - 1) * space) / own.reduce((sum, layers) => sum + layers.length, 0));
  const cell = Math.min(...fitting, 64);
  return cell >= 26 ? cell : Math.min(34, width / 9);
}

export function draw(view, width) {
  const { flow, t } = view;
  const wide = width >= 700;
  const side = wide ? 84 : 0;
  const space = wide ? 12 : 10;
  const groups = flow.groups;
  const apart = flow.csa2 ? space : 0;
  const cell = cellWidth(groups, width - side, apart);
  const { placed, lines } = arrange(groups, cell, width - side, apart);
  const height = lines * ROW - 8;
  return canvas(width, height, { role: "group", "aria-label": t("fig6.title"), "data-across": true },
    wide ? names(view, lines) : [],
    placed.map((piece) => lane(view, piece, { x: side + piece.x, y: piece.line * ROW, cell })),
  );
}

function offsets(y) {
  const kv = y + LANES.layer + GAP;
  const topk = kv + LANES.kv + GAP;
  return { layer: y, kv, topk, window: topk + LANES.topk + GAP };
}

function names(view, lines) {
  return Array.from({ length: lines }, (_, line) => {
    const at = offsets(line * ROW);
    return Object.entries(LANES).map(([name, height]) =>
      label(70, at[name] + height / 2 + 4, view.t(`fig6.${name}`), "end tiny muted"));
  });
}

function lane(view, { layers }, { x, y, cell }) {
  const at = offsets(y);
  const owner = layers[0].kv_owner;
  const own = layers.map((layer, i) => layerGroup(view, layer,
    rect(x + i * cell, y, cell, ROW - 22, "hit"),
    rect(x + i * cell + 1, at.layer, cell - 2, LANES.layer, `cell ${layer.side}`, { rx: 3 }),
    rect(x + i * cell + 1, at.layer + LANES.layer - 3, cell - 2, 3, `work ${layer.side}`),
    label(x + (i + 0.5) * cell, at.layer + 17, layer.id, `middle id${layer.owns ? " strong" : ""}`),
    rect(x + i * cell + 1, at.kv, cell - 2, LANES.kv, `kv ${kvKind(layer)}`, { rx: 2 }),
    rect(x + i * cell + 1, at.window, cell - 2, LANES.window, "window", { rx: 2 }),
    layer.has_engram ? diamond(x + (i + 1) * cell - 7, at.layer + 7) : null,
  ));
  return group({}, own, selections(layers, x, at.topk, cell), foot(view, layers, owner, { x, y: y + ROW - 30, cell }));
}

/** One bar for every run of layers that use the same selection; its start picks, the rest reuse. */
function selections(layers, x, y, cell) {
  const runs = [];
  layers.forEach((layer, i) => {
    if (layer.topk_owner === null) return;
    if (runs.at(-1)?.source === layer.topk_owner) runs.at(-1).to = i;
    else runs.push({ source: layer.topk_owner, from: i, to: i, picks: layer.topk_owner === layer.id });
  });
  return runs.map(({ from, to, picks }) => [
    rect(x + from * cell + 1, y + LANES.topk / 2 - 1, (to - from + 1) * cell - 2, 2, "selection"),
    picks ? rect(x + from * cell + 1, y, Math.min(cell - 2, 10), LANES.topk, "selection", { rx: 2 }) : [],
  ]);
}

/** What the owner stores, written under its group. */
function foot(view, layers, owner, { x, y, cell }) {
  const width = layers.length * cell;
  if (owner === null) return width < 56 ? [] : label(x + 1, y + 14, view.t("fig6.alone"), "tiny muted");
  if (layers[0].id !== owner) return [];
  const rate = count(layers[0].get("kv_bytes_per_token"));
  const bytes = view.t("fig1.rate", { n: rate });
  if (width < 66) return label(x + width / 2, y + 14, rate, "tiny kv-word middle");
  return label(x + 1, y + 14, width < 176 ? bytes : `${view.t("fig6.of", { owner })} · ${bytes}`, "tiny kv-word");
}

export function caption(view) {
  const { flow, t } = view;
  const n = (name) => count(flow.ledger.get(name));
  const values = { owners: flow.owners.length, rate: n("kv_bytes_per_token") };
  if (!flow.csa2) return t("fig6.caption.off", values);
  return t("fig6.caption", {
    ...values, layers: flow.layers.length, borrowers: flow.layers.filter((layer) => layer.borrows).length,
    unshared: n("store.baseline_bytes_per_token"),
  });
}
