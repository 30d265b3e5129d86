// Small makers of SVG and HTML elements. No figure, no number and no word lives here.

const SVG = "http://www.w3.org/2000/svg";

function make(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

export const svg = (tag, attributes = {}, ...children) =>
  make(document.createElementNS(SVG, tag), attributes, children);

export const html = (tag, attributes = {}, ...children) =>
  make(document.createElement(tag), attributes, children);

const round = (value) => Math.round(value * 100) / 100;

/** A whole drawing `width` x `height` CSS pixels large; it is laid out anew when its room changes. */
export const canvas = (width, height, attributes, ...children) =>
  svg("svg", {
    viewBox: `0 0 ${round(width)} ${round(height)}`, width: round(width), height: round(height),
    ...attributes,
  }, ...children);

export const group = (attributes, ...children) => svg("g", attributes, ...children);

export const rect = (x, y, width, height, kind, attributes = {}) =>
  svg("rect", {
    x: round(x), y: round(y), width: round(Math.max(0, width)), height: round(Math.max(0, height)),
    class: kind, ...attributes,
  });

export const label = (x, y, content, kind = "", attributes = {}) =>
  svg("text", { x: round(x), y: round(y), class: kind, ...attributes }, content);

export const path = (points, kind, attributes = {}) =>
  svg("path", { d: points.map((part) => (typeof part === "number" ? round(part) : part)).join(" "),
    class: kind, ...attributes });

/** The small mark of a layer with an n-gram memory. */
export const diamond = (x, y) => path(["M", x, y - 4, "l", 4, 4, "l", -4, 4, "l", -4, -4, "z"], "engram");

/** A polyline through [x, y] pairs with rounded corners and, if asked, an arrow head at its end. */
export function route(points, kind, { arrow = false, radius = 6 } = {}) {
  const parts = ["M", ...points[0]];
  for (let i = 1; i < points.length - 1; i++) {
    const [before, corner, after] = [points[i - 1], points[i], points[i + 1]];
    const near = (to) => {
      const [dx, dy] = [to[0] - corner[0], to[1] - corner[1]];
      const length = Math.hypot(dx, dy) || 1;
      const r = Math.min(radius, length / 2);
      return [corner[0] + (dx / length) * r, corner[1] + (dy / length) * r];
    };
    parts.push("L", ...near(before), "Q", ...corner, ...near(after));
  }
  parts.push("L", ...points.at(-1));
  const line = path(parts, `line ${kind}`);
  return arrow ? [line, head(points.at(-2), points.at(-1), kind)] : [line];
}

function head(from, to, kind) {
  const angle = Math.atan2(to[1] - from[1], to[0] - from[0]);
  const corner = (turn) => [to[0] - 7 * Math.cos(angle + turn), to[1] - 7 * Math.sin(angle + turn)];
  return path(["M", ...to, "L", ...corner(0.42), "L", ...corner(-0.42), "Z"], `head ${kind}`);
}
