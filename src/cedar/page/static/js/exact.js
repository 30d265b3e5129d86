// Numbers as the planner computes them: exact fractions (BigInt n / d, d > 0, lowest terms), and
// floats (a plain Number) where Python has a float. Mixed arithmetic is done in floats, comparison
// is exact, as in Python. Knows nothing about formulas.

export const exact = (n, d = 1n) => {
  if (d === 0n) throw new RangeError("division by zero");
  if (d < 0n) [n, d] = [-n, -d];
  const shared = divisor(n < 0n ? -n : n, d);
  return { n: n / shared, d: d / shared };
};

function divisor(a, b) {
  while (b) [a, b] = [b, a % b];
  return a || 1n;
}

export const isFloat = (value) => typeof value === "number";

/** A stored value (BigInt or Number) or a JSON number as an operand. Whole numbers are exact. */
export function operand(value) {
  if (typeof value === "bigint") return exact(value);
  return Number.isInteger(value) ? exact(BigInt(value)) : value;
}

/** A result as it is stored on a ledger line: BigInt when whole, else Number. */
export function stored(value) {
  if (isFloat(value)) return value;
  return value.d === 1n ? value.n : toFloat(value);
}

/** The nearest double, ties to even: JavaScript rounds one BigInt so, not a quotient of two. */
export function toFloat(value) {
  if (isFloat(value)) return value;
  const { n, d } = value;
  if (d === 1n) return Number(n);
  const size = n < 0n ? -n : n;
  const shift = BigInt(Math.max(0, 64 - bits(size) + bits(d)));
  const scaled = size << shift;
  const sticky = scaled % d ? 1n : 0n;
  const rounded = Number((scaled / d) | sticky) / 2 ** Number(shift);
  return n < 0n ? -rounded : rounded;
}

const bits = (value) => (value ? value.toString(2).length : 0);

function fromFloat(value) {
  let scale = 1n;
  while (!Number.isInteger(value)) {
    value *= 2;
    scale *= 2n;
  }
  return exact(BigInt(value), scale);
}

/** Negative, zero or positive as a is below, equal to or above b. */
export function compare(a, b) {
  if (isFloat(a) && isFloat(b)) return a - b;
  const [x, y] = [a, b].map((value) => (isFloat(value) ? fromFloat(value) : value));
  const difference = x.n * y.d - y.n * x.d;
  return difference < 0n ? -1 : difference > 0n ? 1 : 0;
}

const either = (a, b, floats, fractions) =>
  isFloat(a) || isFloat(b) ? floats(toFloat(a), toFloat(b)) : fractions(a, b);

export const add = (a, b) =>
  either(a, b, (x, y) => x + y, (x, y) => exact(x.n * y.d + y.n * x.d, x.d * y.d));
export const subtract = (a, b) => add(a, negate(b));
export const negate = (a) => (isFloat(a) ? -a : { n: -a.n, d: a.d });
export const multiply = (a, b) =>
  either(a, b, (x, y) => x * y, (x, y) => exact(x.n * y.n, x.d * y.d));
export const divide = (a, b) =>
  either(a, b, divideFloats, (x, y) => exact(x.n * y.d, x.d * y.n));
export const floorDivide = (a, b) => either(a, b, floorFloats, (x, y) => exact(floorQuotient(x, y)));
export const modulo = (a, b) =>
  either(a, b, moduloFloats, (x, y) => subtract(x, multiply(exact(floorQuotient(x, y)), y)));

function floorQuotient(x, y) {
  const [n, d] = [x.n * y.d, x.d * y.n];
  if (d === 0n) throw new RangeError("division by zero");
  const quotient = n / d;
  return n % d !== 0n && n < 0n !== d < 0n ? quotient - 1n : quotient;
}

function divideFloats(x, y) {
  if (y === 0) throw new RangeError("division by zero");
  return x / y;
}

// Python's float floor division and remainder: the remainder has the divisor's sign.
function moduloFloats(x, y) {
  if (y === 0) throw new RangeError("division by zero");
  const rest = x % y;
  return rest !== 0 && rest < 0 !== y < 0 ? rest + y : rest;
}

function floorFloats(x, y) {
  if (y === 0) throw new RangeError("division by zero");
  const rest = x % y;
  const quotient = (x - rest) / y - (rest !== 0 && rest < 0 !== y < 0 ? 1 : 0);
  const floor = Math.floor(quotient);
  return quotient - floor > 0.5 ? floor + 1 : floor;
}

/** The whole part as BigInt, towards zero. */
export const truncate = (value) => (isFloat(value) ? BigInt(Math.trunc(value)) : value.n / value.d);
