// Every line of a flow's ledger as a table that can be filtered. Filled when it is opened.

import { byUnit, count } from "cedar/format.js";
import { html } from "cedar/svg.js";

export class LedgerTable {
  constructor(place) {
    this.place = place;
    this.wanted = "";
    this.open = false;
  }

  update(view) {
    const { t, flow } = view;
    const body = html("tbody");
    const fill = () => body.replaceChildren(...rows(view, this.wanted));
    const filter = html("input", {
      type: "search", value: this.wanted, "aria-label": t("ledger.filter"), placeholder: t("ledger.filter"),
      oninput: (event) => {
        this.wanted = event.target.value;
        fill();
      },
    });
    const heads = ["ledger.name", "ledger.value", "ledger.kind", "ledger.formula"];
    const table = html("table", { class: "ledger-table" },
      html("thead", {}, html("tr", {}, heads.map((key) => html("th", { scope: "col" }, t(key))))), body);
    const details = html("details", {
      open: this.open,
      ontoggle: (event) => {
        this.open = event.target.open;
        if (this.open && !body.children.length) fill();
      },
    }, html("summary", {}, t("ledger.open", { n: count(flow.ledger.lines.length) })),
    filter, html("div", { class: "scroll" }, table));
    if (this.open) fill();
    this.place.replaceChildren(details);
  }
}

function rows(view, wanted) {
  const { ledger, name: flow } = view.flow;
  return ledger.lines.filter(({ name }) => name.includes(wanted.trim())).map((line) => {
    const value = ledger.get(line.name);
    const kind = ledger.kind(line.name);
    return html("tr", { title: line.source },
      html("th", { scope: "row" }, html("code", {}, line.name)),
      html("td", { "data-line": line.name, "data-flow": flow, "data-value": value, title: String(value) }, byUnit(value, line.unit)),
      html("td", {}, html("small", { class: `kind ${kind}` }, view.t(`kind.${kind}`))),
      html("td", {}, html("code", {}, line.formula ?? line.words)));
  });
}
