// A ledger program evaluated for one request: values, and where each comes from.

import { evaluate } from "cedar/expression.js";
import { operand, stored } from "cedar/exact.js";

export class Ledger {
  /**
   * @param {object[]} lines in order: {name, unit, kind, source, formula | value + words}
   * @param {Object<string, number>} given other values for lines that are not computed
   */
  constructor(lines, given) {
    this.lines = lines;
    this.given = given;
    this.byName = new Map(lines.map((line) => [line.name, line]));
    this.known = new Map();
  }

  has(name) {
    return this.byName.has(name);
  }

  /** BigInt when whole, else Number. Lines are evaluated when somebody asks. */
  get(name) {
    if (!this.known.has(name)) this.known.set(name, this.compute(name));
    return this.known.get(name);
  }

  compute(name) {
    const line = this.byName.get(name);
    if (!line) throw new RangeError(`the ledger has no line ${name}`);
    if ("formula" in line) return this.value(line.formula);
    return stored(operand(this.given[name] ?? line.value));
  }

  /** For drawing: a plain Number. */
  number(name) {
    return Number(this.get(name));
  }

  /** Value of another formula over these lines. */
  value(formula) {
    return evaluate(formula, (name) => this.get(name));
  }

  /** Lines a computed line names, in order of appearance. */
  inputs(name) {
    const { formula } = this.byName.get(name);
    const names = formula?.match(/[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*/g) ?? [];
    return [...new Set(names)].filter((input) => this.has(input));
  }

  /**
   * given, derived, measured or quoted; "mixed" for what is derived from a quoted figure.
   */
  kind(name) {
    const { kind } = this.byName.get(name);
    const isMixed = (input) => ["quoted", "mixed"].includes(this.kind(input));
    return kind === "derived" && this.inputs(name).some(isMixed) ? "mixed" : kind;
  }
}
