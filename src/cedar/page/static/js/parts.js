// Parts that several figures share: a layer one can point at, a map of token-layers, a bar.

import { group, html, label, rect, svg } from "cedar/svg.js";
import { spoken } from "cedar/layer_card.js";

/** A number with its kind, as HTML; `data-*` name the ledger line it is. */
export function figureOf(view, flow, name, written) {
  const kind = flow.ledger.kind(name);
  return html("span", {
    class: "number", "data-line": name, "data-flow": flow.name, "data-value": flow.ledger.get(name),
  }, written, " ", html("small", { class: `kind ${kind}` }, view.t(`kind.${kind}`)));
}

/** A number of the ledger inside a drawing, without its kind. */
export const valueSpan = (flow, name, written) =>
  svg("tspan", {
    class: "value", "data-line": name, "data-flow": flow.name, "data-value": flow.ledger.get(name),
  }, written);

/** The same with its kind, as children of a text. */
export function numberSpans(view, flow, name, written) {
  const kind = flow.ledger.kind(name);
  return [
    valueSpan(flow, name, written),
    svg("tspan", { class: `kind ${kind}`, dx: 6 }, view.t(`kind.${kind}`)),
  ];
}

/**
 * A group one can point at, tap and focus; `layer_card.js` listens. One layer of a drawing is in
 * the tab order, arrow keys reach the others.
 */
export const layerGroup = (view, layer, ...children) =>
  group({
    class: `layer ${layer.side} ${layer.role}`, role: "button", tabindex: layer.id === 0 ? 0 : -1,
    "aria-label": spoken(view, layer), "data-layer": layer.id, "data-flow": layer.flow.name,
    "data-kv": layer.kv_owner, "data-topk": layer.topk_owner,
  }, ...children);

/** Fill class of the KV cell of a layer. */
export const kvKind = (layer) => (layer.owns ? "owned" : layer.borrows ? "borrowed" : "nothing");

/** Where the last tokens of the prompt begin to be drawn wider than they are; see `TokenAxis`. */
const LEAST_SHARE = 0.13;

/** The prompt as a horizontal axis whose last `tail` tokens stay visible, by breaking the axis. */
export class TokenAxis {
  constructor(x, width, tokens, tail) {
    Object.assign(this, { x, width, tokens, tail });
    const share = tail / tokens;
    this.broken = share < LEAST_SHARE;
    this.gap = this.broken ? Math.min(10, Math.max(4, width * 0.02)) : 0;
    this.tailWidth = this.broken ? Math.max(20, width * LEAST_SHARE) : width * share;
    this.headWidth = width - this.tailWidth - this.gap;
    this.tailX = x + width - this.tailWidth;
  }

  /** [x, width] pieces of the last `rows` tokens. */
  pieces(rows) {
    if (rows <= 0) return [];
    if (rows <= this.tail) {
      const width = this.tailWidth * (rows / this.tail);
      return [[this.x + this.width - width, width]];
    }
    const before = this.tokens - this.tail;
    const width = before ? this.headWidth * ((rows - this.tail) / before) : 0;
    const start = this.x + this.headWidth - width;
    if (!this.broken) return [[start, width + this.tailWidth]];
    return [[start, width], [this.tailX, this.tailWidth]].filter((piece) => piece[1] > 0);
  }
}

/** Name of the number that says how many prompt tokens a layer runs. */
const runOf = (layer) => (layer.side === "encoder" ? "encode" : "replay");

function workPieces(axis, layer, { y, height }) {
  const run = layer.number(runOf(layer));
  return [
    axis.pieces(axis.tokens).map(([x, width]) => rect(x, y, width, height, "idle")),
    axis.pieces(run).map(([x, width]) => rect(x, y, width, height, `work ${layer.side}`)),
  ];
}

function projectionPieces(axis, layer, { y, height }) {
  const thin = Math.max(1.2, Math.min(3, height * 0.3));
  return axis.pieces(layer.number("project")).map(([x, width]) =>
    rect(x, y + (height - thin) / 2, width, thin, "projection"));
}

/** One layer in a map of token-layers: what it runs, projects and leaves out. */
export const mapRow = (axis, layer, row) => [workPieces(axis, layer, row), projectionPieces(axis, layer, row)];

/**
 * A whole small map: layer 0 at the bottom, neighbours that run alike as one block, and beside it
 * the KV rows: cells of the owners on a strip of what is borrowed.
 */
export function smallMap(view, flow, { x, y, width, height }) {
  const cells = 16;
  const axis = new TokenAxis(x, width - cells - 6, view.state.input_tokens, tailOf(view));
  const rows = rowsOf(flow, y, height, 4, 0);
  const [kvX, thin] = [x + width - cells, Math.min(1, height / flow.layers.length / 4)];
  return group({ class: "map" },
    blocksOf(rows).map(({ layer, ...block }) => workPieces(axis, layer, block)),
    rows.map(({ layer, ...row }) => projectionPieces(axis, layer, row)),
    blocksOf(rows, (layer) => layer.side + (layer.role !== "window")).map((block) =>
      block.layer.role === "window" ? [] : rect(kvX, block.y, cells, block.height, "kv borrowed")),
    rows.map(({ layer, ...row }) =>
      layer.owns ? rect(kvX, row.y + thin / 2, cells, row.height - thin, "kv owned") : []),
  );
}

/** Rows of neighbours that are alike, joined. */
function blocksOf(rows, alike = (layer) => layer.side + layer.get(runOf(layer))) {
  const blocks = [];
  for (const row of rows) {
    const last = blocks.at(-1);
    if (last && alike(last.layer) === alike(row.layer)) {
      last.height += last.y - row.y;
      last.y = row.y;
    } else {
      blocks.push({ ...row });
    }
  }
  return blocks;
}

/** Tokens of the prompt's tail as a flow with CED replays them; one window if there is none. */
export function tailOf(view) {
  const flow = view.possible.find((candidate) => candidate.ced);
  if (flow) return flow.ledger.number("phases.replay.tail");
  return Math.min(view.state.input_tokens, view.possible[0].ledger.number("model.window"));
}

/** Layers with their row in `height` pixels, layer 0 at the bottom, a gap at the cut, `space` between rows. */
export function rowsOf(flow, y, height, cut, space = 1) {
  const decoder = flow.decoder.length;
  const step = (height - (decoder ? cut : 0)) / flow.layers.length;
  return flow.layers.map((layer) => {
    const above = flow.layers.length - 1 - layer.id;
    const shift = layer.side === "encoder" && decoder ? cut : 0;
    return { layer, y: y + above * step + shift, height: step - space };
  });
}

/** Whether a bar needs two lines of words. */
const isNarrow = (width) => width < 400;

/** Height that a bar takes, `under` pixels of words below it included. */
export const barHeight = (width, under = 0) => 46 + under + (isNarrow(width) ? 18 : 0);

/**
 * A bar with its caption above it.
 * @param {{x, y, width}} place
 * @param {{title, spans, parts: {value, kind}[], max, quote?, measured?}} content lengths are in
 *   the unit of `max`, the length of the whole track
 */
export function bar(place, { title, spans, parts, max, quote, measured }) {
  const { x, width } = place;
  const two = isNarrow(width);
  const y = place.y + (two ? 18 : 0);
  const scale = (value) => (max > 0 ? (width * value) / max : 0);
  let at = x;
  const pieces = parts.map(({ value, kind }) => {
    const piece = rect(at, y + 22, scale(value), 10, kind);
    at += scale(value);
    return piece;
  });
  return group({ class: "bar" },
    label(x, place.y + 14, title, "title"),
    two ? label(x, y + 15, spans) : label(x + width, y + 14, spans, "end"),
    rect(x, y + 22, width, 10, "track"),
    pieces,
    quote === undefined ? [] : mark(x + scale(quote), y + 27, "quote"),
    measured === undefined ? [] : mark(x + scale(measured), y + 27, "measured"),
  );
}

const mark = (x, y, kind) =>
  kind === "quote"
    ? svg("path", { class: "mark quote", d: `M${x} ${y - 7}l7 7l-7 7l-7-7z` })
    : svg("path", { class: "mark measured", d: `M${x - 1.5} ${y - 8}h3v16h-3z` });
