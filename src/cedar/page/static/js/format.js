// Numbers as people read them; the same rules as cedar/units.py. Takes BigInt or Number.

const PREFIXES = [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]];

// Made once: making one costs more than a thousand uses.
const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const UP_TO_TWO = new Intl.NumberFormat("en-US", { maximumFractionDigits: 2 });
const TWO = new Intl.NumberFormat("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

const grouped = (value, digits) => (digits ? TWO : WHOLE).format(value);

function prefixed(value, unit, like) {
  const number = Number(value);
  for (const [prefix, scale] of PREFIXES) {
    if (like >= scale) return `${grouped(number / scale, 2)} ${prefix}${unit}`;
  }
  return `${grouped(number, Number.isInteger(number) ? 0 : 2)} ${unit}`;
}

/** Powers of 1000: 27590000 -> "27.59 MB". */
export const bytes = (value) => prefixed(value, "B", Number(value));

/** With the prefix that `like` would have, so that numbers side by side share theirs. */
export const flops = (value, like = value) => prefixed(value, "FLOP", Number(like));

/** 30000 -> "30,000"; at most two decimals. */
export const count = (value) => (typeof value === "bigint" ? WHOLE : UP_TO_TWO).format(value);

/** Three significant digits: 0.0124 -> "12.4 ms", 9000 -> "2.5 h". */
export function seconds(value) {
  const short = (number) => String(Number(number.toPrecision(3)));
  if (value >= 7200) return `${short(value / 3600)} h`;
  for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
    if (value >= scale) return `${short(value / scale)} ${unit}`;
  }
  return `${short(value * 1e9)} ns`;
}

/** 0.5 -> "50%". */
export const percent = (share) => `${Number((100 * share).toPrecision(3))}%`;

/** Parameters: 7895563064 -> "7.90 B". */
export function parameters(value) {
  const number = Number(value);
  for (const [name, scale] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (number >= scale) return `${(number / scale).toFixed(2)} ${name}`;
  }
  return count(value);
}

/** How the page writes a line of a given unit. */
export function byUnit(value, unit) {
  switch (unit) {
    case "B":
      return bytes(value);
    case "FLOP":
      return flops(value);
    case "parameters":
      return parameters(value);
    case "":
      return Number.isInteger(Number(value)) ? count(value) : String(Number(Number(value).toPrecision(4)));
    default:
      return `${count(value)} ${unit}`;
  }
}
