// Puts the page together: state, words, figures, tables. Drawing lives in the fig_*.js modules.

import * as architecture from "cedar/fig_architecture.js";
import * as ced from "cedar/fig_ced.js";
import * as decode from "cedar/fig_decode.js";
import * as flows from "cedar/fig_flows.js";
import * as groups from "cedar/fig_groups.js";
import * as requestPath from "cedar/fig_path.js";
import * as prefill from "cedar/fig_prefill.js";
import {
  firstState, makeNumberFields, modelTitle, nameControls, remember, showControls, showProblem,
} from "cedar/controls.js";
import { differencesTable, figureFrame, glance, legend, marked, note, putWords, worded } from "cedar/frame.js";
import { LayerCard } from "cedar/layer_card.js";
import { LedgerTable } from "cedar/ledger_table.js";
import { RecordSection } from "cedar/measured.js";
import { html } from "cedar/svg.js";
import { requestProblem, translator, View } from "cedar/view.js";

const find = (id) => document.getElementById(id);
const read = (id) => JSON.parse(find(id).textContent);

const DATA = read("cedar-data");
const WORDS = read("cedar-words");
const TAGS = { en: "en", zh: "zh-CN" };
const PRINT_WIDTH = 720;
const LEAST_WIDTH = 240; // drawings are laid out for this; in less room the style sheet shrinks them

const SECTIONS = [
  { id: "machine", figures: [{ n: 1, ...architecture }] },
  { id: "path", figures: [{ n: 2, ...requestPath }, { n: 3, ...prefill }, { n: 4, ...decode }] },
  { id: "ideas", figures: [{ n: 5, ...ced }, { n: 6, ...groups }] },
  {
    id: "flows",
    figures: DATA.flows.map((flow, i) => ({
      n: 7 + i, flow, draw: flows.drawFlow(flow), caption: flows.captionFlow(flow),
    })),
  },
];

class Page {
  constructor() {
    Object.assign(this, firstState(DATA, Object.keys(WORDS)));
    this.ledgerTable = new LedgerTable(find("ledger"));
    this.card = new LayerCard(() => this.view);
    this.record = new RecordSection(DATA, (request) => this.change(request));
    this.build();
    this.measure();
    if (find("cedar-record").textContent.trim()) this.record.load(read("cedar-record"));
    this.speak();
    this.listen();
  }

  get t() {
    return translator(WORDS[this.state.language].text);
  }

  build() {
    this.frames = [];
    for (const { id, figures } of SECTIONS) {
      const frames = figures.map((drawing) => ({ ...drawing, place: figureFrame(drawing) }));
      this.frames.push(...frames);
      find("sections").append(html("section", { class: `section-${id}` },
        html("h2", { "data-t": `section.${id}` }),
        id === "flows" ? html("p", { "data-t": "section.flows.lead" }) : null,
        html("div", { class: "figures" }, frames.map(({ place }) => place.figure))));
    }
    makeNumberFields((name, value, typed) => {
      this.typed[name] = typed;
      this.change({ [name]: value });
    });
  }

  listen() {
    const form = find("controls");
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("change", ({ target }) => {
      if (target.id === "model") this.change({ model: target.value });
      if (target.name === "flow") this.change({ flow: target.value });
    });
    find("languages").addEventListener("click", ({ target }) => {
      if (!target.dataset.language) return;
      this.state.language = target.dataset.language;
      this.speak();
    });
    find("themes").addEventListener("click", ({ target }) => {
      if (target.dataset.themeName) this.change({ theme: target.dataset.themeName });
    });
    find("skip").addEventListener("click", (event) => {
      event.preventDefault(); // the address holds the state
      find("figures").focus();
      find("figures").scrollIntoView();
    });
    const wide = matchMedia("(min-width: 860px)");
    const unfold = () => (find("request").open = wide.matches);
    wide.addEventListener("change", unfold);
    unfold();
    addEventListener("resize", () => {
      if (this.width === document.documentElement.clientWidth) return;
      this.measure();
      this.drawFigures();
    });
    addEventListener("beforeprint", () => this.drawFigures(PRINT_WIDTH));
    addEventListener("afterprint", () => this.drawFigures());
  }

  /** Everything that depends on the language, then everything else. */
  speak() {
    const { t } = this;
    document.documentElement.lang = TAGS[this.state.language];
    putWords(t);
    nameControls(t, WORDS[this.state.language].text, DATA);
    find("legend").replaceChildren(...legend(t));
    const version = document.querySelector("meta[name=generator]").content;
    find("footer").textContent = t("footer", { version });
    this.refresh();
  }

  change(changes) {
    Object.assign(this.state, changes);
    this.refresh();
  }

  /** Shows the state; of a request that is not possible it says so and leaves the figures alone. */
  refresh() {
    const { t, state } = this;
    const model = DATA.models.find(({ name }) => name === state.model);
    if (model.flows[state.flow].unavailable) {
      state.flow = DATA.flows.findLast((flow) => !model.flows[flow].unavailable);
    }
    this.dress();
    showControls(t, WORDS[state.language].text, DATA, state, this.typed);
    const problem = requestProblem(model, state, this.typed, t);
    showProblem(problem && `${problem.text} ${t("error.stale")}`, problem?.field);
    find("figures").classList.toggle("stale", Boolean(problem));
    const last = this.view?.state ?? { ...DATA.controls, model: DATA.models[0].name };
    this.show(problem ? { ...last, language: state.language, theme: state.theme } : state);
  }

  /** Draws a possible state and keeps it in the address. */
  show(state) {
    const { t } = this;
    clearTimeout(this.remembering); // browsers limit how often an address may change
    this.remembering = setTimeout(() => remember(state), 200);
    const measured = this.record.measuredFor(state);
    this.view = new View(DATA, { ...state }, t, measured);
    this.draw();
  }

  dress() {
    document.documentElement.dataset.theme = this.state.theme;
    for (const [id, chosen] of [["themes", this.state.theme], ["languages", this.state.language]]) {
      for (const button of find(id).children) {
        const name = button.dataset.themeName ?? button.dataset.language;
        button.setAttribute("aria-pressed", name === chosen);
      }
    }
  }

  draw() {
    const { view, t } = this;
    const { text, differences } = WORDS[view.state.language];
    this.differences = view.model.differences.map((one) => ({ ...one, ...worded(one, differences) }));
    this.title = modelTitle(t, view.model.name, text);
    find("glance").replaceChildren(...glance(view));
    find("differences").replaceChildren(differencesTable(t, this.differences));
    find("ledger-lead").replaceChildren(...marked(t("ledger.lead", { flow: t(`flow.${view.flow.name}`) })));
    this.ledgerTable.update(view);
    this.record.update(view);
    this.drawFigures();
  }

  /** Reads how wide each drawing may be. Costs a layout of the page, so only when that may change. */
  measure() {
    this.width = document.documentElement.clientWidth;
    for (const { place } of this.frames) place.room = Math.max(LEAST_WIDTH, place.drawing.clientWidth);
  }

  drawFigures(paper) {
    if (!this.view) return;
    this.card.hide();
    for (const frame of this.frames) {
      this.drawFigure(frame, paper ? paper / (frame.flow ? 2 : 1) : frame.place.room);
    }
  }

  drawFigure({ n, flow, draw, caption, place }, width) {
    const { view, t } = this;
    const shown = flow ?? view.flow.name;
    const held = place.drawing.contains(document.activeElement) && document.activeElement.dataset.layer;
    place.number.textContent = t("figure", { n });
    place.title.textContent = t(`fig${n}.title`);
    place.plan.textContent = t("figure.plan", { model: this.title, flow: t(`flow.${shown}`) });
    place.figure.classList.toggle("chosen", flow === view.flow.name);
    place.drawing.replaceChildren(draw(view, width));
    place.caption.textContent = caption(view);
    if (held) place.drawing.querySelector(`[data-layer="${held}"]`)?.focus();
    const notes = this.differences.filter((one) => one.figures.includes(n));
    place.notes.hidden = notes.length === 0;
    place.summary.textContent = t("figure.notes");
    place.noteList.replaceChildren(...notes.map((one) => note(t, one)));
  }
}

new Page();
