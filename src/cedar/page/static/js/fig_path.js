// Figure 2: the whole path of a request, phases above and memory below (beside, when narrow).

import { bytes, count, flops } from "cedar/format.js";
import { canvas, group, label, path, rect, route } from "cedar/svg.js";

/** Phases in order: what runs, on how much, and the KV bytes it writes. */
function phases(view) {
  const { flow, t } = view;
  const { ledger } = flow;
  const times = (phase, key) => [
    t("fig2.tokens", { n: count(ledger.get(`phases.${phase}.tokens`)) }),
    t(key, { n: count(ledger.get(`phases.${phase}.layers`)) }),
  ];
  const fromEncoder = flow.sum(flow.encoder, "prompt_kv_bytes");
  const fromBoundary = flow.sum(flow.decoder, "prompt_kv_bytes");
  const whole = BigInt(ledger.get("kv_bytes"));
  const list = [
    { name: "encode", side: "encoder", times: times("encode", "fig2.times"), writes: fromEncoder },
    { name: "project", side: "kv", times: times("project", "fig2.times.owners"), writes: fromBoundary },
    { name: "replay", side: "decoder", times: times("replay", "fig2.times"), writes: 0n },
    { name: "decode", side: "both", times: times("decode", "fig2.times"), writes: whole - fromEncoder - fromBoundary },
  ];
  if (!flow.ced) {
    list[2].writes = fromBoundary;
    list[2].title = t("fig2.replay.full");
    list.splice(1, 1);
  }
  if (!flow.decoder.length) list.splice(1, list.length - 2);
  const total = ledger.number("flops.prefill.total") + ledger.number("flops.decode.total");
  return list.map((phase) => ({
    title: t(`fig2.${phase.name}`), ...phase,
    flops: ledger.get(`flops.${phase.name}.total`),
    share: ledger.number(`flops.${phase.name}.total`) / total,
  }));
}

/** Where things stand: `a` runs along the path, `b` across it; down the page when it is narrow. */
class Place {
  constructor(width, steps) {
    this.wide = width >= 700;
    this.steps = steps;
    if (this.wide) {
      Object.assign(this, { ends: 96, gap: width < 860 ? 20 : 30, strip: 34, apart: 30, across: 116, between: 78, deep: 54 });
      this.step = (width - 2 * (this.ends + this.gap) - (steps - 1) * this.gap) / steps;
    } else {
      Object.assign(this, { ends: 42, gap: 26, strip: 24, apart: 16, across: Math.min(200, width * 0.43), step: 114 });
      this.deep = Math.min(96, width * 0.24);
      this.between = width - this.strip - this.apart - this.across - this.deep;
    }
    this.first = this.ends + this.gap;
    this.last = this.first + steps * this.step + (steps - 1) * this.gap;
    this.length = this.last + this.gap + this.ends;
    this.top = this.strip + this.apart; // of the phases
    this.foot = this.top + this.across;
    this.memory = this.foot + this.between;
  }

  box(a, b, da, db) {
    return this.wide ? { x: a, y: b, width: da, height: db } : { x: b, y: a, width: db, height: da };
  }

  point(a, b) {
    return this.wide ? [a, b] : [b, a];
  }

  start(i) {
    return this.first + i * (this.step + this.gap);
  }

  center(i) {
    return this.start(i) + this.step / 2;
  }
}

export function draw(view, width) {
  const { t } = view;
  const steps = phases(view);
  const place = new Place(width, steps.length);
  const middle = (place.top + place.foot) / 2;
  const arrow = (a) => route([place.point(a + 3, middle), place.point(a + place.gap - 3, middle)], "flow", { arrow: true });
  const terminal = (a, title, name) => {
    const { x, y, width: w, height: h } = place.wide
      ? place.box(a, middle - 27, place.ends, 54)
      : place.box(a, place.top, place.ends, place.across);
    const tokens = t("fig2.tokens", { n: count(view.state[name]) });
    return [rect(x, y, w, h, "terminal", { rx: 8 }), named({ x, y, width: w, height: h }, title, tokens, "small muted")];
  };
  const parts = [
    terminal(0, t("fig2.prompt"), "input_tokens"), arrow(place.ends),
    steps.map((phase, i) => [
      phaseBox(phase, place.box(place.start(i), place.top, place.step, place.across)),
      arrow(place.start(i) + place.step),
    ]),
    terminal(place.last + place.gap, t("fig2.answer"), "output_tokens"),
    windows(view, place, steps),
    memory(view, place, steps),
  ];
  const store = disk(view, place);
  return canvas(width, store.bottom + 2, { role: "img", "aria-label": spokenPath(view, steps) }, parts, store.nodes);
}

function phaseBox(phase, { x, y, width, height }) {
  const middle = x + width / 2;
  return group({ class: `phase ${phase.side}` },
    rect(x, y, width, height, "box", { rx: 8 }),
    label(middle, y + 24, phase.title, "middle strong"),
    phase.times.map((line, i) => label(middle, y + 44 + i * 17, line, "middle small")),
    label(middle, y + 82, flops(phase.flops), "middle small muted"),
    rect(x + 12, y + height - 16, width - 24, 5, "track"),
    rect(x + 12, y + height - 16, (width - 24) * phase.share, 5, "share"),
  );
}

/** Two centred lines: what it is, how much. */
function named({ x, y, width, height }, title, size, kind = "") {
  const [middle, center] = [x + width / 2, y + height / 2];
  return [
    label(middle, center - 4, title, `middle strong ${kind.includes("on-kv") ? "on-kv" : ""}`),
    label(middle, center + 14, size, `middle ${kind}`),
  ];
}

/** The rings of all layers: filled by every phase that runs layers, read at every step. */
function windows(view, place, steps) {
  const r = place.box(place.first, 0, place.last - place.first, place.strip);
  const size = bytes(view.flow.ledger.get("window_bytes"));
  const [x, y] = [r.x + r.width / 2, r.y + r.height / 2];
  const turn = place.wide ? {} : { transform: `rotate(-90 ${x} ${y})` };
  const text = label(x, y + 4.5, `${view.t("fig2.windows")} · ${size}`, "middle small", turn);
  const arrows = steps.filter(({ name }) => name !== "project").map(({ name }) => {
    const a = place.center(steps.findIndex((step) => step.name === name));
    return route([place.point(a, place.top - 3), place.point(a, place.strip + 3)], "ring", { arrow: true });
  });
  return [rect(r.x, r.y, r.width, r.height, "memory rings", { rx: 6 }), text, arrows];
}

/** The KV cache: what each phase writes into it, and that decode reads it. */
function memory(view, place, steps) {
  const { t, flow } = view;
  const kv = place.box(place.first, place.memory, place.last - place.first, place.deep);
  const parts = [rect(kv.x, kv.y, kv.width, kv.height, "memory kv", { rx: 6 }),
    named(kv, t("fig2.kv"), bytes(flow.ledger.get("kv_bytes")), "on-kv")];
  steps.forEach(({ name, writes }, i) => {
    if (!writes) return;
    const at = place.center(i) - (name === "decode" ? place.step * 0.3 : 0);
    const [x, y] = place.point(at, (place.foot + place.memory) / 2);
    parts.push(
      route([place.point(at, place.foot + 3), place.point(at, place.memory - 3)], "kv", { arrow: true }),
      place.wide ? label(x + 8, y + 4, bytes(writes), "small muted") : label(x, y - 7, bytes(writes), "tiny muted middle"),
    );
  });
  const read = place.center(steps.length - 1) + place.step * 0.38;
  parts.push(route([place.point(read, place.memory - 3), place.point(read, place.foot + 3)], "kv", { arrow: true }));
  return parts;
}

/** The prefix store: rows go there and come back on a hit. */
function disk(view, place) {
  const { t, flow } = view;
  const kv = place.box(place.first, place.memory, place.last - place.first, place.deep);
  const [below, height] = [kv.y + kv.height, 62];
  const r = { x: kv.x + kv.width * 0.25, y: below + 40, width: kv.width * 0.5, height };
  if (!place.wide) Object.assign(r, { x: 0, y: place.length + 22, width: kv.x + kv.width });
  const at = (share) => kv.x + kv.width * share;
  const [down, up] = place.wide ? [0.42, 0.58] : [0.25, 0.6];
  const nodes = [
    cylinder(r),
    named({ ...r, y: r.y + 5 }, t("fig2.store"), bytes(flow.ledger.get("persisted_bytes"))),
    route([[at(down), below + 3], [at(down), r.y - 1]], "kv", { arrow: true }),
    route([[at(up), r.y - 1], [at(up), below + 3]], "kv dashed", { arrow: true }),
    label(at(up) + 7, below + 24, t("fig2.hit"), "tiny muted"),
  ];
  return { nodes, bottom: r.y + height };
}

function cylinder({ x, y, width, height }) {
  const r = 7;
  const arc = (sweep) => ["a", width / 2, r, 0, 0, sweep];
  return group({ class: "cylinder" },
    path(["M", x, y + r, ...arc(1), width, 0, "v", height - 2 * r, ...arc(1), -width, 0, "z"], "store"),
    path(["M", x, y + r, ...arc(0), width, 0], "line store-rim"),
  );
}

const spokenPath = (view, steps) =>
  [view.t("fig2.title"), ...steps.map((phase) => `${phase.title}: ${phase.times.join(" ")}, ${flops(phase.flops)}`)].join(". ");

export function caption(view) {
  const { ledger } = view.flow;
  return view.t("fig2.caption", {
    prefill: flops(ledger.get("flops.prefill.total")), decode: flops(ledger.get("flops.decode.total")),
    replay: count(ledger.get("hit.replay_rows")),
    layers: count(view.flow.ced ? ledger.get("model.encoder_layers") : ledger.get("model.layers")),
  });
}
