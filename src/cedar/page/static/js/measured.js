// The record of a `cedar compare` run: loaded, checked, and its measured numbers beside predicted ones.

import { bytes, count, percent, seconds } from "cedar/format.js";
import { html } from "cedar/svg.js";
import { View } from "cedar/view.js";

const QUANTITIES = {
  encode_token_layers: count, decoder_token_layers: count, kv_bytes: bytes, window_bytes: bytes,
  persisted_bytes: bytes, prefill_seconds: seconds, decode_seconds: seconds,
};

export const modelName = (record) => record.model?.name ?? record.model;

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** What is wrong with a parsed file, as {key, values} for the words; null if it is a record. */
export function recordProblem(record, flows) {
  if (!isObject(record) || typeof modelName(record) !== "string") return { key: "record.model" };
  const sizes = [record.request?.input_tokens, record.request?.output_tokens];
  if (!sizes.every((size) => Number.isSafeInteger(size) && size > 0)) return { key: "record.request" };
  const named = isObject(record.flows) ? Object.keys(record.flows) : [];
  if (!named.length || named.some((name) => !flows.includes(name))) return { key: "record.flows" };
  const measured = Object.entries(measuredOf(record));
  if (!measured.length) return { key: "record.measured" };
  for (const [flow, numbers] of measured) {
    for (const key of Object.keys(QUANTITIES)) {
      if (key in numbers && typeof numbers[key] !== "number") {
        return { key: "record.number", values: { key, flow } };
      }
    }
  }
  return null;
}

/** Whether a number of a record was measured; a record may hold derived ones and says so. */
export const isMeasured = (numbers, name) => !numbers[`${name}_kind`]?.startsWith("derived");

/** {flow: measured numbers} of a record. */
export const measuredOf = (record) =>
  Object.fromEntries(
    Object.entries(record.flows)
      .filter(([, flow]) => isObject(flow?.measured))
      .map(([name, flow]) => [name, flow.measured]),
  );

/** Whether the controls show the very request that was measured. */
export const shows = (record, state) =>
  modelName(record) === state.model &&
  record.request.input_tokens === state.input_tokens &&
  record.request.output_tokens === state.output_tokens;

/** The table of a record; `predict(flow, name)` gives the ledger's number or undefined. */
export function recordTable(t, record, predict) {
  const rows = Object.entries(measuredOf(record)).flatMap(([flow, numbers]) =>
    Object.entries(QUANTITIES)
      .filter(([name]) => name in numbers)
      .map(([name, write], i, all) => quantityRow(t, { flow, name, write, numbers, predict, first: i === 0, span: all.length })));
  const heads = ["control.flow", "measured.quantity", "measured.predicted", "measured.measured", "measured.difference"];
  return html("div", { class: "scroll" }, html("table", { class: "measured-table" },
    html("thead", {}, html("tr", {}, heads.map((key) => html("th", { scope: "col" }, t(key))))),
    html("tbody", {}, rows)));
}

function quantityRow(t, { flow, name, write, numbers, predict, first, span }) {
  const predicted = predict(flow, name);
  const measured = numbers[name];
  return html("tr", { class: first ? "first" : "" },
    first ? html("th", { scope: "rowgroup", rowspan: span }, t(`flow.${flow}`)) : null,
    html("td", {}, t(`measured.${name}`)),
    html("td", { "data-predicted": predicted }, predicted === undefined ? "–" : write(predicted)),
    html("td", { "data-measured": measured, "data-flow": flow, "data-quantity": name }, write(measured),
      isMeasured(numbers, name.replace(/_bytes$/, "")) ? null : [" ", html("small", { class: "kind derived" }, t("measured.derived"))]),
    html("td", {}, difference(t, predicted, measured)));
}

function difference(t, predicted, measured) {
  if (predicted === undefined) return "–";
  if (Number(predicted) === measured) return t("measured.exact");
  const share = (measured - Number(predicted)) / Number(predicted);
  return `${share > 0 ? "+" : "−"}${percent(Math.abs(share))}`;
}

const find = (id) => document.getElementById(id);

/** The section of the page that holds the record. */
export class RecordSection {
  /** @param show is told the request of a record, for the controls */
  constructor(data, show) {
    Object.assign(this, { data, show, record: null, problem: null });
    find("record-file").addEventListener("change", async ({ target }) => {
      if (target.files.length) this.take(await target.files[0].text());
      target.value = ""; // the same file can be chosen again
    });
  }

  /** Reads the text of a file that was chosen. */
  take(text) {
    let record;
    try {
      record = JSON.parse(text);
    } catch (error) {
      this.refuse({ key: "record.json", values: { error: error.message } });
      return;
    }
    const problem = recordProblem(record, this.data.flows);
    if (problem) {
      this.refuse(problem);
      return;
    }
    this.load(record);
    this.show(this.request);
  }

  refuse(problem) {
    this.problem = problem;
    this.show({});
  }

  /** Takes a checked record. */
  load(record) {
    this.record = record;
    this.problem = null;
  }

  get known() {
    return this.data.models.some((model) => model.name === modelName(this.record));
  }

  /** The record's request as a state of the controls; the model only if the page holds it. */
  get request() {
    const { input_tokens, output_tokens } = this.record.request;
    return { ...(this.known ? { model: modelName(this.record) } : {}), input_tokens, output_tokens };
  }

  measuredFor(state) {
    return this.record && shows(this.record, state) ? measuredOf(this.record) : {};
  }

  update(view) {
    const { t } = view;
    const state = find("record-state");
    const table = find("record-table");
    state.className = this.problem ? "problem" : "muted";
    if (this.problem) state.textContent = t(this.problem.key, this.problem.values);
    if (!this.record) {
      if (!this.problem) state.textContent = t("measured.none");
      table.replaceChildren();
      return;
    }
    const { input_tokens: input, output_tokens: output } = this.record.request;
    const name = modelName(this.record);
    if (!this.problem) {
      state.textContent = t("measured.loaded", { model: name, input: count(input), output: count(output) });
    }
    table.replaceChildren(...this.remarks(view, name), recordTable(t, this.record, this.predictor(view)));
  }

  remarks(view, name) {
    const { t } = view;
    if (!this.known) return [html("p", { class: "muted" }, t("measured.unknown_model", { model: name }))];
    if (shows(this.record, view.state)) return [];
    const back = html("button", { type: "button", class: "button", onclick: () => this.show(this.request) }, t("measured.return"));
    return [html("p", { class: "muted" }, t("measured.elsewhere"), " ", back)];
  }

  /** The ledger's number for the record's own request; the record's if its model is not here. */
  predictor(view) {
    if (!this.known) return (flow, name) => this.record.flows[flow][name];
    const theirs = new View(this.data, { ...view.state, ...this.request }, view.t, {});
    return (flow, name) => {
      const { ledger } = theirs.flows[flow];
      return ledger?.has(name) ? ledger.get(name) : undefined;
    };
  }
}
