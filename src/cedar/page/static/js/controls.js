// The page's state and its controls. The state is kept in the address after `#`, so that what is
// shown can be shared and printed; nothing else is stored.

import { count } from "cedar/format.js";
import { html } from "cedar/svg.js";
import { CONTROLS } from "cedar/view.js";

const find = (id) => document.getElementById(id);

/**
 * First state: what the address says, else what the file says, else what the browser prefers; and
 * the numbers as they were written.
 */
export function firstState(data, languages) {
  const asked = new URLSearchParams(location.hash.slice(1));
  const one = (name, allowed, otherwise) => (allowed.includes(asked.get(name)) ? asked.get(name) : otherwise);
  const models = data.models.map((model) => model.name);
  const preferred = navigator.languages.map((tag) => tag.slice(0, 2)).find((tag) => languages.includes(tag));
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const state = {
    model: one("model", models, models[0]),
    flow: one("flow", data.flows, data.controls.flow),
    language: one("language", languages, preferred ?? languages[0]),
    theme: one("theme", ["light", "dark"], dark ? "dark" : "light"),
  };
  const typed = {};
  for (const name of CONTROLS) {
    typed[name] = asked.get(name) ?? String(data.controls[name]);
    state[name] = readNumber(typed[name]);
  }
  return { state, typed };
}

export function remember(state) {
  const address = new URLSearchParams(Object.entries(state).map(([name, value]) => [name, String(value)]));
  history.replaceState(null, "", `#${address}`);
}

/** "30,000" or "30000" as a number, whole or not; NaN for what is none. */
export const readNumber = (text) =>
  /^\s*[+-]?\d[\d,_ ]*(\.\d+)?\s*$/.test(text) ? Number(text.replace(/[,_\s]/g, "")) : NaN;

export const modelTitle = (t, name, words) => (`model.${name}` in words ? t(`model.${name}`) : name);

// A slider is logarithmic: 1 at the left, the model's context at the right, two digits in between.
const STEPS = 1000;
const toSlider = (value, limit) => Math.round((STEPS * Math.log(Math.max(1, value))) / Math.log(limit));

function fromSlider(step, limit) {
  const value = Math.exp((step / STEPS) * Math.log(limit));
  return Math.min(limit, Math.max(1, Number(value.toPrecision(2))));
}

/** Makes the three number fields; `change(name, value)` hears of every new number. */
export function makeNumberFields(change) {
  for (const place of document.querySelectorAll("[data-number]")) {
    const name = place.dataset.number;
    const heard = (event) => change(name, readNumber(event.target.value), event.target.value);
    const box = html("input", {
      id: name, type: "text", inputmode: "numeric", spellcheck: "false", "aria-describedby": "problem",
      oninput: heard,
      onchange: (event) => {
        const value = readNumber(event.target.value);
        if (Number.isFinite(value)) event.target.value = count(value);
      },
    });
    const slider = html("input", {
      id: `${name}-slider`, type: "range", min: 0, max: STEPS, tabindex: -1, "aria-hidden": "true",
      oninput: (event) => {
        const value = fromSlider(Number(event.target.value), Number(slider.dataset.limit));
        box.value = count(value);
        change(name, value, box.value);
      },
    });
    place.replaceChildren(html("label", { for: name, "data-t": `control.${name}` }), box, slider);
  }
}

/** Writes the choices in the language of the page; they are not made anew afterwards. */
export function nameControls(t, words, data) {
  find("model").replaceChildren(...data.models.map(({ name }) => new Option(modelTitle(t, name, words), name)));
  find("flow").replaceChildren(...data.flows.map((flow) => html("label", {},
    html("input", { type: "radio", name: "flow", value: flow }), html("span", {}, t(`flow.${flow}`)))));
}

/** Makes the controls show the state. A number that is being typed is left alone. */
export function showControls(t, words, data, state, typed) {
  const model = data.models.find(({ name }) => name === state.model);
  find("model").value = state.model;
  for (const choice of find("flow").querySelectorAll("input")) {
    const reason = model.flows[choice.value].unavailable;
    choice.checked = choice.value === state.flow;
    choice.disabled = Boolean(reason);
    choice.parentNode.title = reason ? t("flow.unavailable", { reason }) : "";
  }
  for (const name of CONTROLS) {
    const [box, slider] = [find(name), find(`${name}-slider`)];
    if (document.activeElement !== box) box.value = Number.isFinite(state[name]) ? count(state[name]) : typed[name];
    slider.dataset.limit = model.max_tokens - 1;
    if (document.activeElement !== slider) slider.value = toSlider(state[name], model.max_tokens - 1);
  }
  find("request-summary").textContent = t("control.summary", {
    model: modelTitle(t, state.model, words), input: count(state.input_tokens), output: count(state.output_tokens),
  });
}

/** Says what is wrong with the request, or clears it. */
export function showProblem(text, field) {
  const place = find("problem");
  place.hidden = !text;
  if (place.textContent !== text) place.textContent = text ?? "";
  for (const name of CONTROLS) find(name).setAttribute("aria-invalid", name === field);
}
