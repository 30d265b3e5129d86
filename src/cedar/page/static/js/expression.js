// The language of ledger formulas, as in cedar/planner/expression.py: names, numbers, + - * / // %,
// parentheses and seven functions. Formulas are parsed once and never given to eval.

import {
  add, compare, divide, exact, floorDivide, modulo, multiply, negate, operand, stored, subtract,
  toFloat, truncate,
} from "cedar/exact.js";

const ONE = exact(1n);

const ceilDiv = (a, b) => exact(-truncate(floorDivide(negate(a), b)));

function pow2ceil(value) {
  const below = ceilDiv(value, ONE).n - 1n;
  const bits = below <= 0n ? 0 : below.toString(2).length;
  return exact(1n << BigInt(bits));
}

/** Sum over t = 1..queries of min(t // ratio, cap), in closed form. */
function seen(queries, ratio, cap) {
  const [n, r, limit] = [queries, ratio, cap].map(truncate);
  if (n <= 0n || limit <= 0n) return exact(0n);
  const whole = limit * r - 1n;
  const full = n < whole ? n : whole;
  const groups = (full + 1n) / r;
  const rest = (full + 1n) % r;
  const below = (r * groups * (groups - 1n)) / 2n + groups * rest;
  return exact(below + (n > whole ? limit * (n - whole) : 0n));
}

function touched(experts, chosen, tokens) {
  const e = toFloat(experts);
  return e * (1 - Math.pow(1 - toFloat(chosen) / e, toFloat(tokens)));
}

const least = (...values) => values.reduce((a, b) => (compare(b, a) < 0 ? b : a));
const greatest = (...values) => values.reduce((a, b) => (compare(b, a) > 0 ? b : a));

const FUNCTIONS = {
  min: least,
  max: greatest,
  floor: (value) => exact(truncate(floorDivide(value, ONE))),
  ceil_div: ceilDiv,
  pow2ceil,
  seen,
  touched,
};

const BINARY = {
  "+": add, "-": subtract, "*": multiply, "/": divide, "//": floorDivide, "%": modulo,
};

const TOKEN = /\s*(?:(\d+\.?\d*(?:[eE][+-]?\d+)?)|([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)|(\/\/|[-+*/%(),]))/y;

function tokens(formula) {
  const found = [];
  TOKEN.lastIndex = 0;
  const end = formula.trimEnd().length;
  while (TOKEN.lastIndex < end) {
    const at = TOKEN.lastIndex;
    const match = TOKEN.exec(formula);
    if (!match) throw new SyntaxError(`cannot read ${formula.slice(at)} in the formula ${formula}`);
    found.push({ number: match[1], name: match[2], mark: match[3] });
  }
  return found;
}

/** A node is a function from a lookup of names to a value. */
function parse(formula) {
  const rest = tokens(formula);
  const is = (...marks) => rest.length > 0 && marks.includes(rest[0].mark);
  const take = (mark) => {
    if (!is(mark)) throw new SyntaxError(`expected ${mark} in the formula ${formula}`);
    rest.shift();
  };
  const chain = (next, ...marks) => () => {
    let left = next();
    while (is(...marks)) {
      const [operate, before, right] = [BINARY[rest.shift().mark], left, next()];
      left = (names) => operate(before(names), right(names));
    }
    return left;
  };
  const unary = () => {
    if (!is("-")) return atom();
    take("-");
    const inner = unary();
    return (names) => negate(inner(names));
  };
  const product = chain(unary, "*", "/", "//", "%");
  const sum = chain(product, "+", "-");
  const call = (name) => {
    if (!Object.hasOwn(FUNCTIONS, name)) {
      throw new SyntaxError(`${name} is no function in the formula ${formula}`);
    }
    take("(");
    const parts = [sum()];
    while (is(",")) {
      take(",");
      parts.push(sum());
    }
    take(")");
    return (names) => FUNCTIONS[name](...parts.map((part) => part(names)));
  };
  const atom = () => {
    if (is("(")) {
      take("(");
      const inner = sum();
      take(")");
      return inner;
    }
    const token = rest.shift();
    if (token?.number !== undefined) {
      const whole = /^\d+$/.test(token.number);
      const value = whole ? exact(BigInt(token.number)) : Number(token.number);
      return () => value;
    }
    if (token?.name === undefined) throw new SyntaxError(`the formula ${formula} ends too early`);
    return is("(") ? call(token.name) : (names) => operand(names(token.name));
  };
  const tree = sum();
  if (rest.length) throw new SyntaxError(`unexpected rest in the formula ${formula}`);
  return tree;
}

const parsed = new Map();

/** Value of a formula: BigInt when whole, else Number. `lookup(name)` gives stored values. */
export function evaluate(formula, lookup) {
  if (!parsed.has(formula)) parsed.set(formula, parse(formula));
  return stored(parsed.get(formula)(lookup));
}
