// What a layer owns, borrows and runs: as words for screen readers, and as a card beside the layer
// that is pointed at, tapped or focused. Also moves between layers with the arrow keys.

import { bytes, count } from "cedar/format.js";
import { html } from "cedar/svg.js";

/** [heading, sentence] pairs about one layer. */
function facts(view, layer) {
  const { t } = view;
  const window = bytes(layer.get("window_bytes"));
  const rate = count(layer.get("kv_bytes_per_token"));
  const total = bytes(layer.get("kv_bytes"));
  const owns = layer.owns
    ? t("layer.owns.kv", { rate, bytes: total, window })
    : t("layer.owns.window", { window });
  const key = { reuse: "kv", reindex: "rows" }[layer.role] ?? "none";
  const borrows = t(`layer.borrows.${key}`, { kv: layer.kv_owner, topk: layer.topk_owner });
  const rows = [
    [t("layer.owns"), owns],
    [t("layer.borrows"), borrows],
    [t("layer.prefill"), prefill(view, layer)],
    [t("layer.decode"), decode(view, layer)],
  ];
  const also = [
    layer.has_engram && t("layer.also.engram"),
    layer.candidate !== "none" && t(`layer.also.${layer.candidate}`),
    layer.kv_adapter !== "none" && t("layer.also.adapter", { kind: layer.kv_adapter }),
  ].filter(Boolean);
  return also.length ? [...rows, [t("layer.also"), also.join("; ")]] : rows;
}

function prefill(view, layer) {
  const run = layer.flow.ced ? "replay" : "full";
  const parts = [
    ["encode", "encode"],
    ["project", "project"],
    ["replay", run],
  ].filter(([name]) => layer.number(name) > 0);
  return parts.map(([name, key]) => view.t(`layer.prefill.${key}`, { n: count(layer.get(name)) })).join("; ");
}

function decode(view, layer) {
  const run = view.t("layer.decode.run", {
    n: count(layer.get("decode")), window: count(layer.get("read_window")),
    selected: count(layer.get("read_selected")),
  });
  const scored = layer.get("scored");
  return scored ? `${run}; ${view.t("layer.decode.scores", { n: count(scored) })}` : run;
}

const heading = (view, layer) =>
  [view.t("layer.title", { id: layer.id }), view.t(`side.${layer.side}`), view.t(`role.${layer.role}`)]
    .join(" · ");

/** Everything about a layer as one sentence. */
export const spoken = (view, layer) =>
  [heading(view, layer), ...facts(view, layer).map(([name, text]) => `${name}: ${text}`)].join(". ");

/** The card and the keys; one for the whole page. */
export class LayerCard {
  /** @param current gives the view that is drawn */
  constructor(current) {
    this.current = current;
    this.pinned = null;
    this.card = html("div", { id: "layer-card", class: "card", hidden: true });
    document.body.append(this.card);
    const on = (type, handler) =>
      document.addEventListener(type, (event) => {
        const mark = event.target.closest?.(".layer");
        handler.call(this, mark, event);
      });
    on("pointerover", (mark, event) => event.pointerType === "mouse" && this.hover(mark));
    on("focusin", (mark) => (mark ? this.show(mark) : this.hide()));
    on("click", this.click);
    on("keydown", this.key);
  }

  hover(mark) {
    if (mark) this.show(mark);
    else if (!this.pinned && !document.activeElement?.closest?.(".layer")) this.hide();
  }

  click(mark, event) {
    if (mark) {
      this.pinned = mark;
      this.show(mark);
    } else if (!event.target.closest("#layer-card")) {
      this.hide();
    }
  }

  key(mark, event) {
    if (event.key === "Escape") this.hide();
    const step = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1 }[event.key];
    if (!mark || (!step && !["Home", "End"].includes(event.key))) return;
    event.preventDefault();
    const marks = [...mark.ownerSVGElement.querySelectorAll(".layer")]
      .sort((a, b) => a.dataset.layer - b.dataset.layer);
    const at = { Home: 0, End: marks.length - 1 }[event.key] ?? marks.indexOf(mark) + step;
    if (!marks[at]) return;
    marks.forEach((other) => other.setAttribute("tabindex", other === marks[at] ? 0 : -1));
    marks[at].focus();
  }

  show(mark) {
    if (mark !== this.pinned) this.pinned = null;
    const view = this.current();
    const layer = view.flows[mark.dataset.flow].layers[mark.dataset.layer];
    this.card.className = `card ${layer.side}`;
    this.card.replaceChildren(
      html("button", { type: "button", class: "close", "aria-label": view.t("close"), onclick: () => this.hide() }, "×"),
      html("h3", {}, heading(view, layer)),
      html("dl", {}, facts(view, layer).map(([name, text]) => [html("dt", {}, name), html("dd", {}, text)])),
    );
    this.card.hidden = false;
    this.relate(mark);
    this.place(mark);
  }

  hide() {
    this.pinned = null;
    this.card.hidden = true;
    for (const kin of document.querySelectorAll(".is-kin, .is-source, .has-kin")) {
      kin.classList.remove("is-kin", "is-source", "has-kin");
    }
  }

  /** Marks, inside the same drawing, the layers that share KV rows with this one. */
  relate(mark) {
    const drawing = mark.ownerSVGElement;
    for (const other of document.querySelectorAll(".is-kin, .is-source, .has-kin")) {
      other.classList.remove("is-kin", "is-source", "has-kin");
    }
    drawing.classList.add("has-kin");
    for (const other of drawing.querySelectorAll(".layer")) {
      const shares = mark.dataset.kv !== undefined && other.dataset.kv === mark.dataset.kv;
      other.classList.toggle("is-kin", shares || other === mark);
      other.classList.toggle("is-source", shares && other.dataset.layer === mark.dataset.kv);
    }
  }

  /**
   * Beside the layer, below it where layers stand side by side; at the foot of a narrow window the
   * style sheet takes over.
   */
  place(mark) {
    const layer = mark.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.card;
    const room = document.documentElement.clientWidth;
    const across = "across" in mark.ownerSVGElement.dataset;
    const right = across ? layer.left : layer.right + 14;
    const fits = right + width + 8 < room;
    const left = fits ? right : Math.max(8, across ? room - width - 8 : layer.left - width - 14);
    const wanted = across ? layer.bottom + 8 : layer.top - 12;
    const top = Math.min(Math.max(8, wanted), window.innerHeight - height - 8);
    this.card.style.left = `${left + window.scrollX}px`;
    this.card.style.top = `${top + window.scrollY}px`;
  }
}
