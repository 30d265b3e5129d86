// Figure 1: two stacks of layers, the cut between them, and how the decoder's KV rows are made.

import { count } from "cedar/format.js";
import { kvKind, layerGroup } from "cedar/parts.js";
import { canvas, diamond, group, label, rect, route } from "cedar/svg.js";

const TOP = 84;
const FOOT = 62;

/** Columns of the drawing, all in pixels. */
function columns(width) {
  const wide = width >= 700;
  const total = Math.min(width, 940);
  const [kv, stack, gap] = wide
    ? [Math.min(124, width * 0.125), Math.min(196, width * 0.19), 6]
    : [28, 102, 4];
  const left = (width - total) / 2;
  const half = kv + gap + stack;
  return {
    wide, kv, stack, gap,
    encoder: left, decoder: left + total - half,
    middle: left + half, span: total - 2 * half,
  };
}

function rowHeight(rows) {
  if (rows <= 10) return 36;
  return rows <= 24 ? 23 : Math.max(15, 520 / rows);
}

function stack(view, layers, x, at, geometry) {
  const { t } = view;
  const { wide, kv, stack: width, gap } = geometry;
  return layers.map((layer, i) => {
    const { y, height } = at(i);
    const middle = y + height / 2 + 4;
    const sx = x + kv + gap;
    const rate = t("fig1.rate", { n: count(layer.get("kv_bytes_per_token")) });
    return layerGroup(view, layer,
      rect(x, y, kv + gap + width, height, "hit"),
      rect(x, y, kv, height, `kv ${kvKind(layer)}`, { rx: 2 }),
      wide && layer.owns ? label(x + kv / 2, middle, rate, "on-owned middle small") : null,
      rect(sx, y, width, height, `cell ${layer.side}`, { rx: 3 }),
      rect(sx, y, 4, height, `work ${layer.side}`),
      label(sx + (wide ? 30 : 24), middle, layer.id, "end id"),
      label(sx + (wide ? 38 : 30), middle, t(`role.${layer.role}`), `role-name ${layer.role}`),
      layer.has_engram ? diamond(sx + width - (wide ? 26 : 18), y + height / 2) : null,
      rect(sx + width - (wide ? 14 : 11), y + height / 2 - 4, 8, 8, "window", { rx: 2 }),
    );
  });
}

const header = (x, width, y, title, subtitle, kind) => [
  label(x + width / 2, y, title, `middle strong ${kind}`),
  label(x + width / 2, y + 17, subtitle, "middle small muted"),
];

export function draw(view, width) {
  const { t, flow } = view;
  const geometry = columns(width);
  const { encoder, decoder } = flow;
  const rows = Math.max(encoder.length, decoder.length);
  const step = rowHeight(rows);
  const bottom = TOP + rows * step;
  const height = bottom + FOOT;
  const at = (i) => ({ y: bottom - (i + 1) * step + 1, height: step - 2 });
  const { kv, gap, stack: stackWidth } = geometry;
  const [ex, dx] = [geometry.encoder + kv + gap, geometry.decoder + kv + gap];
  const range = (layers) => t("fig1.layers", { from: layers[0].id, to: layers.at(-1).id });
  const tokens = t("fig1.tokens", { n: count(view.state.input_tokens) });
  const parts = [
    header(ex, stackWidth, 18, t("fig1.encoder"), range(encoder), "encoder"),
    stack(view, encoder, geometry.encoder, at, geometry),
    label(ex + stackWidth / 2, height - 8, tokens, "middle small"),
    route([[ex + stackWidth / 2, height - 22], [ex + stackWidth / 2, bottom + 6]], "encoder", { arrow: true }),
  ];
  if (decoder.length) {
    parts.push(
      header(dx, stackWidth, 18, t("fig1.decoder"), range(decoder), "decoder"),
      stack(view, decoder, geometry.decoder, at, geometry),
      label(dx + stackWidth / 2, 60, t("fig1.logits"), "middle small"),
      route([[dx + stackWidth / 2, bottom - decoder.length * step - 2], [dx + stackWidth / 2, 66]], "decoder", { arrow: true }),
      between(view, geometry, { at, step, bottom, ex, dx, rows }),
    );
  }
  return canvas(width, height, { role: "group", "aria-label": t("fig1.title") }, parts);
}

/** The boundary stream: down to the decoder's foot, and through the projections into its KV. */
function between(view, geometry, { at, step, bottom, ex, dx }) {
  const { t, flow } = view;
  const { middle, span, wide, stack: stackWidth, decoder } = geometry;
  const encoderTop = bottom - flow.encoder.length * step;
  const [streamX, busX] = [middle + span * 0.36, middle + span * (wide ? 0.72 : 0.68)];
  const pillY = 52;
  const center = ex + stackWidth / 2;
  const foot = bottom + 22;
  const stream = flow.ced ? "thin" : "thick";
  const rows = flow.ledger.number("phases.replay.tail");
  const owners = flow.decoder.filter((layer) => layer.number("project") > 0);
  const parts = [
    route([[center, encoderTop - 2], [center, pillY], [streamX, pillY], [streamX, foot], [dx + stackWidth / 2, foot], [dx + stackWidth / 2, bottom + 3]], `stream ${stream}`, { arrow: true }),
  ];
  if (owners.length) {
    const ys = owners.map((layer) => {
      const { y, height } = at(layer.id - flow.encoder.length);
      return y + height / 2;
    });
    parts.push(
      route([[streamX, pillY], [busX, pillY], [busX, Math.max(...ys)]], "kv"),
      ys.map((y) => route([[busX, y], [decoder - 2, y]], "kv", { arrow: true })),
    );
  }
  const pill = group({},
    rect(streamX - 17, pillY - 13, 34, 26, "pill", { rx: 13 }),
    label(streamX, pillY + 4.5, `H${flow.encoder.length}`, "middle strong"),
  );
  const n = count(view.state.input_tokens);
  const streamText = flow.ced ? t("fig1.stream", { n: count(rows) }) : t("fig1.stream.full", { n });
  const words = [[streamX, streamX - middle, 0.62, streamText, "end small muted"]];
  if (owners.length) words.push([busX, busX - streamX, 0.24, t("fig1.projection", { n }), "end small kv-word"]);
  if (wide) {
    const tall = bottom - TOP;
    parts.push(words.map(([x, room, share, text, kind]) =>
      lines(text, (room - 20) / 6.3).map((line, i) => label(x - 10, TOP + tall * share + i * 15, line, kind))));
  }
  return [...parts, pill];
}

/** Words broken into lines of about `most` characters, at spaces (or anywhere in Chinese). */
function lines(text, most) {
  const pieces = text.match(/[\u3000-\u9fff\uff00-\uffef]\s*|[^\s\u3000-\u9fff\uff00-\uffef]+\s*/g) ?? [];
  const out = [""];
  let size = 0;
  for (const piece of pieces) {
    const length = /[\u3000-\uffef]/.test(piece) ? 2 : piece.trimEnd().length;
    if (size && size + length > most) {
      out.push("");
      size = 0;
    }
    out[out.length - 1] += piece;
    size += /\s$/.test(piece) ? length + 1 : length;
  }
  return out.map((line) => line.trim());
}

export function caption(view) {
  const { flow, t } = view;
  const n = (name) => count(flow.ledger.get(name));
  const key = flow.ced ? "fig1.caption.ced" : "fig1.caption.full";
  return t(key, {
    encoder: flow.encoder.length, last: flow.encoder.length - 1, layers: flow.layers.length,
    owners: n("phases.project.layers"), tail: n("phases.replay.tail"), input: n("input_tokens"),
  });
}
