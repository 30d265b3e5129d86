// The parts of the page around the figures: words, numbers at a glance, legend, differences.

import { bytes, count, percent } from "cedar/format.js";
import { figureOf } from "cedar/parts.js";
import { html } from "cedar/svg.js";

/** Puts the words of one language where page.html asks for them. */
export function putWords(t) {
  for (const place of document.querySelectorAll("[data-t]")) place.replaceChildren(...marked(t(place.dataset.t)));
  for (const place of document.querySelectorAll("[data-t-label]")) {
    place.setAttribute("aria-label", t(place.dataset.tLabel));
  }
  document.title = t("title");
}

/** Words between backticks as code. */
export const marked = (text) => text.split("`").map((part, i) => (i % 2 ? html("code", {}, part) : part));

const SWATCHES = ["encoder", "decoder", "owned", "borrowed", "window", "idle", "engram"];
const KINDS = ["derived", "quoted", "mixed", "measured"];

/** The colours and the kinds of numbers. */
export function legend(t) {
  const colours = SWATCHES.map((name) =>
    html("li", {}, html("i", { class: `swatch ${name}` }), t(`legend.${name}`)));
  const kinds = KINDS.map((kind) =>
    html("li", {}, html("small", { class: `kind ${kind}` }, t(`kind.${kind}`)), t(`kind.${kind}.long`)));
  return [...colours, ...kinds];
}

/** Four numbers of the chosen flow, each against the flow with neither idea. */
export function glance(view) {
  const { t, flow } = view;
  const { ledger } = flow;
  const neither = view.flows.none.ledger;
  const share = (name) => percent(ledger.number(name) / neither.number(name));
  const activation = Number(ledger.get("prefill_activation"));
  const cards = [
    ["reading", "prefill_activation", [count(activation < 100 ? activation : Math.round(activation)), html("span", { class: "unit" }, ` × ${t("unit.activation")}`)],
      { share: share("prefill_activation") }],
    ["remembering", "kv_bytes", bytes(ledger.get("kv_bytes")),
      { rate: count(ledger.get("kv_bytes_per_token")), share: share("kv_bytes") }],
    ["window", "window_bytes", bytes(ledger.get("window_bytes")),
      { layers: count(ledger.get("model.layers")), window: count(ledger.get("model.window")) }],
    ["persisting", "persisted_bytes", bytes(ledger.get("persisted_bytes")),
      { share: percent(ledger.number("store.share")), turn: count(view.state.tokens_per_turn) }],
  ];
  return cards.map(([name, line, written, values]) =>
    html("div", { class: "tile" },
      html("h3", {}, t(`glance.${name}`)),
      html("p", { class: "big" }, figureOf(view, flow, line, written)),
      html("p", { class: "muted" }, t(`glance.${name}.note`, values))));
}

/** A difference in the language of the page: the planner's own words, or their translation. */
export const worded = (difference, translations) => translations[difference.topic] ?? difference;

/** All differences of the chosen model. */
export function differencesTable(t, differences) {
  if (!differences.length) return html("p", { class: "muted" }, t("differences.none"));
  const heads = ["differences.topic", "note.article", "note.release"];
  return html("div", { class: "scroll" }, html("table", { class: "differences-table" },
    html("thead", {}, html("tr", {}, heads.map((key) => html("th", { scope: "col" }, t(key))))),
    html("tbody", {}, differences.map(({ topic, article, release }) =>
      html("tr", {}, html("th", { scope: "row" }, topic), html("td", {}, article), html("td", {}, release))))));
}

/** One difference, as it stands under a figure. */
export function note(t, { topic, article, release }) {
  return html("div", { class: "difference" },
    html("p", {}, html("strong", {}, topic)),
    html("p", {}, html("span", { class: "who" }, t("note.article")), article),
    html("p", {}, html("span", { class: "who" }, t("note.release")), release));
}

/** The frame of one figure; what stands in its places is filled in at every change. */
export function figureFrame({ n, flow }) {
  const place = {
    number: html("span", { class: "figure-number" }),
    title: html("span", { class: "figure-title" }),
    plan: html("p", { class: "figure-plan" }),
    drawing: html("div", { class: "drawing" }),
    caption: html("p", { class: "caption" }),
    summary: html("summary"),
    noteList: html("div"),
  };
  const heading = `figure-${n}-title`;
  place.notes = html("details", { class: "notes" }, place.summary, place.noteList);
  place.figure = html("figure", { id: `figure-${n}`, class: "figure", "aria-labelledby": heading, "data-flow": flow },
    html("h3", { id: heading }, place.number, " ", place.title),
    place.plan, place.drawing, html("figcaption", {}, place.caption, place.notes));
  return place;
}
