// What the figures are given: one model, one request, its flows with their ledgers and layers, the
// words of one language. Plain data and look-ups; nothing is drawn here.

import { count } from "cedar/format.js";
import { Ledger } from "cedar/ledger.js";

/** Numbers of the request that the page's controls set. */
export const CONTROLS = ["input_tokens", "output_tokens", "tokens_per_turn"];

/** One layer of one flow: its place in the plan, and what it holds and runs in this request. */
class Layer {
  constructor(spec, flow, formulas) {
    Object.assign(this, spec);
    this.flow = flow;
    this.texts = formulas[spec.formulas];
  }

  /** A named number of the layer: BigInt when whole, else Number. */
  get(name) {
    return this.flow.formula(this.texts[name]);
  }

  number(name) {
    return Number(this.get(name));
  }

  get owns() {
    return this.role === "full";
  }

  get borrows() {
    return this.role === "reindex" || this.role === "reuse";
  }
}

/** One flow of the model: `unavailable` says why it cannot run, or `ledger` and `layers` exist. */
class Flow {
  constructor(name, source, data, given) {
    this.name = name;
    this.unavailable = source.unavailable;
    if (this.unavailable) return;
    this.ledger = new Ledger(source.program.map((position) => data.lines[position]), given);
    this.known = new Map();
    this.layers = source.layers.map((spec) => new Layer(spec, this, data.formulas));
  }

  formula(text) {
    if (!this.known.has(text)) this.known.set(text, this.ledger.value(text));
    return this.known.get(text);
  }

  get ced() {
    return this.name.split("+").includes("ced");
  }

  get csa2() {
    return this.name.split("+").includes("csa2");
  }

  get encoder() {
    return this.layers.filter((layer) => layer.side === "encoder");
  }

  get decoder() {
    return this.layers.filter((layer) => layer.side === "decoder");
  }

  get owners() {
    return this.layers.filter((layer) => layer.owns);
  }

  /** Owners and the layers that read their rows, in order; layers without compressed rows last. */
  get groups() {
    const members = new Map();
    for (const layer of this.layers) {
      if (!members.has(layer.kv_owner)) members.set(layer.kv_owner, []);
      members.get(layer.kv_owner).push(layer);
    }
    return [...members.values()];
  }

  /** Sum of a named number over some layers, exact. */
  sum(layers, name) {
    return layers.reduce((total, layer) => total + BigInt(layer.get(name)), 0n);
  }
}

export class View {
  /**
   * @param data what `cedar.page.figures.page_data` made
   * @param state {model, flow, input_tokens, output_tokens, tokens_per_turn}
   * @param t words: t(key, values)
   * @param measured {flow: numbers} of a loaded record of this model and request, or {}
   */
  constructor(data, state, t, measured) {
    Object.assign(this, { data, state, t, measured });
    this.model = data.models.find((model) => model.name === state.model);
    const given = Object.fromEntries(CONTROLS.map((name) => [name, state[name]]));
    this.flows = Object.fromEntries(
      data.flows.map((name) => [name, new Flow(name, this.model.flows[name], data, given)]),
    );
    this.flow = this.flows[state.flow];
  }

  /** The flows that this model can run, in the article's order. */
  get possible() {
    return this.data.flows.map((name) => this.flows[name]).filter((flow) => !flow.unavailable);
  }

  /** The flow that differs in CED only, off or on. */
  withCed(on) {
    const csa2 = this.flow.csa2;
    return this.flows[on ? (csa2 ? "ced+csa2" : "ced") : csa2 ? "csa2" : "none"];
  }

  /** Smallest value of a line over the possible flows. */
  smallest(name) {
    return Math.min(...this.possible.map((flow) => flow.ledger.number(name)));
  }

  /** Largest value of a line over the possible flows, for a shared scale. */
  largest(name) {
    return Math.max(...this.possible.map((flow) => flow.ledger.number(name)));
  }
}

/** What is wrong with a request: {field, text}; null when it is possible. `typed` is as written. */
export function requestProblem(model, request, typed, t) {
  for (const name of CONTROLS) {
    if (Number.isSafeInteger(request[name]) && request[name] >= 1) continue;
    const value = typed[name] ?? String(request[name]);
    return { field: name, text: t("error.whole", { name: t(`control.${name}`), value: value.trim() || "–" }) };
  }
  const { input_tokens: input, output_tokens: output } = request;
  if (input + output <= model.max_tokens) return null;
  const numbers = { input, output, total: input + output, limit: model.max_tokens };
  const written = Object.entries(numbers).map(([name, value]) => [name, count(value)]);
  return { field: "input_tokens", text: t("error.context", Object.fromEntries(written)) };
}

/**
 * Words of one language. In a text `{name}` stands for values.name, and `{name:one/many}` for one
 * of two words, by whether that value is 1.
 */
export function translator(words) {
  return (key, values = {}) => {
    if (!(key in words)) throw new RangeError(`there is no text ${key}`);
    return words[key].replace(/\{(\w+)(?::([^/}]*)\/([^}]*))?\}/g, (_, name, one, many) => {
      if (!(name in values)) throw new RangeError(`the text ${key} needs ${name}`);
      const value = String(values[name]);
      return one === undefined ? value : value === "1" ? one : many;
    });
  };
}
