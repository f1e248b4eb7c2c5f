// The prefix tree on the page: pages of it by cursor, filters, and a row a branch.

import { Refused, explain, get } from "./api.js";
import { askToClear, askToPin, titleOf } from "./actions.js";
import { openDetail } from "./detail.js";
import { byId, element, fill, setText } from "./dom.js";
import { ago, bytes, count, counted, shortHash } from "./format.js";
import { TIERS } from "./history.js";
import { Tree } from "./tree.js";

const PAGE = 100;
// A refresh reads again what has been read, up to this many pages.
const MOST_PAGES = 8;
const REFRESH_MS = 5000;
const DEEPEST_INDENT = 8;
// The server lists branches by their hashes, which mean nothing; what has been read is sorted here.
const ORDERS = {
  used: (a, b) => (b.last_use_s ?? 0) - (a.last_use_s ?? 0),
  hits: (a, b) => b.num_hits - a.num_hits,
  tokens: (a, b) => b.num_tokens - a.num_tokens,
  size: (a, b) => b.nbytes - a.nbytes,
};

/** Blocks by tier, as a coloured mark, a word and a number each. */
function tierMarks(byTier) {
  const held = TIERS.filter((tier) => byTier[tier] > 0);
  return held.length
    ? held.map((tier) =>
        element(
          "span",
          { class: "mark" },
          element("span", { class: `swatch tone-${tier}` }),
          `${tier} ${count(byTier[tier])}`,
        ),
      )
    : "nowhere";
}

class Row {
  constructor(view) {
    this._view = view;
    this._toggle = element("button", { type: "button", class: "toggle", onclick: () => view.toggle(this.report) });
    this._name = element("button", { type: "button", class: "link", onclick: () => view.open(this.report.id) });
    this._under = element("span", { class: "quiet" });
    this._orphan = element(
      "button",
      { type: "button", class: "link small", onclick: () => view.showParent(this.report) },
      "show what it continues",
    );
    this._level = element("span", { class: "hidden" });
    this._cells = ["tokens", "where", "size", "hits", "used", "pins"].map((name) =>
      element("td", { class: ["where", "pins"].includes(name) ? null : "number" }),
    );
    this._pin = element(
      "button",
      { type: "button", onclick: () => view.act(askToPin(this.report, view.tiers())) },
      "Pin",
    );
    this._clear = element(
      "button",
      { type: "button", onclick: () => view.act(askToClear(view.tiers(), this.report)) },
      "Clear",
    );
    this._head = element(
      "th",
      { scope: "row" },
      element(
        "div",
        { class: "branch" },
        this._toggle,
        element("div", {}, this._level, this._name, this._under, this._orphan),
      ),
    );
    this.node = element(
      "tr",
      {},
      this._head,
      this._cells,
      element("td", {}, element("div", { class: "buttons" }, this._pin, this._clear)),
    );
  }

  update({ report, level, open, numMissing, isOrphan }) {
    const changed = JSON.stringify([report, level, open, numMissing, isOrphan]) !== this._shown;
    this.report = report;
    setText(this._cells[4], ago(report.last_use_s));
    if (!changed) return;
    this._shown = JSON.stringify([report, level, open, numMissing, isOrphan]);
    const title = titleOf(report);
    this._head.dataset.level = Math.min(level, DEEPEST_INDENT);
    setText(this._level, `Level ${level}: `);
    this._toggle.classList.toggle("leaf", report.num_children === 0);
    this._toggle.disabled = report.num_children === 0;
    this._toggle.setAttribute("aria-expanded", report.num_children > 0 && open ? "true" : "false");
    this._toggle.setAttribute(
      "aria-label",
      report.num_children
        ? `${title}: ${counted(report.num_children, "branch", "branches")} below`
        : `${title} ends here`,
    );
    setText(this._name, title);
    const missing = open && numMissing > 0 ? ` · ${count(numMissing)} more below, not shown` : "";
    setText(
      this._under,
      `${report.name || report.first_words ? `${shortHash(report.id)} · ` : ""}${report.tenant}${report.last_words ? ` · … ${report.last_words}` : ""}${missing}`,
    );
    this._orphan.hidden = !isOrphan;
    fill(
      this._cells[0],
      count(report.num_tokens),
      element("span", { class: "quiet" }, ` +${count(report.num_own_tokens)}`),
    );
    fill(this._cells[1], tierMarks(report.blocks_by_tier));
    setText(this._cells[2], bytes(report.nbytes));
    setText(this._cells[3], count(report.num_hits));
    const retained = report.priority !== null && report.priority > 35 ? `retained (${report.priority})` : "";
    setText(
      this._cells[5],
      report.pins.length ? (report.pins.length === 1 ? "pinned" : `${report.pins.length} pins`) : retained,
    );
    this._pin.setAttribute("aria-label", `Pin ${title}`);
    this._clear.setAttribute("aria-label", `Clear ${title}`);
  }
}

export class Prefixes {
  /** `tiers()` are the tiers' reports, `pins()` the known pins, `changed()` is called after anything was changed. */
  constructor({ tiers, pins, changed }) {
    Object.assign(this, { tiers, pins, _changed: changed });
    this._tree = new Tree();
    this._rows = new Map();
    this._cursor = null;
    this._numPages = 1;
    this._total = 0;
    this._turn = 0;
    this._busy = false;
    const form = byId("filters");
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", (event) => {
      if (event.target.name === "order") {
        this._render();
        return;
      }
      clearTimeout(this._typing);
      this._typing = setTimeout(() => this.restart(), 250);
    });
    byId("more").addEventListener("click", () => this._more());
    byId("refresh").addEventListener("click", () => this.refresh());
    this._timer = setInterval(() => {
      if (byId("auto").checked && !document.hidden && !document.querySelector("dialog[open]")) this.refresh();
    }, REFRESH_MS);
  }

  _query(cursor) {
    const form = new FormData(byId("filters"));
    const filters = Object.fromEntries(["q", "tier", "pinned", "tenant"].map((name) => [name, form.get(name).trim()]));
    return { limit: PAGE, cursor, ...filters };
  }

  /** Begin at the first page, after a filter changed. */
  restart() {
    this._numPages = 1;
    return this.refresh();
  }

  /** Read again what is shown. An answer that a later question has overtaken is dropped. */
  async refresh() {
    this._turn += 1;
    const turn = this._turn;
    const reports = [];
    let cursor = null;
    let page = null;
    try {
      for (let i = 0; i < this._numPages; i += 1) {
        page = await get("admin/cache/prefixes", this._query(cursor));
        reports.push(...page.prefixes);
        cursor = page.next_cursor;
        if (!cursor) break;
      }
    } catch (error) {
      if (turn !== this._turn) return;
      // What another key was allowed to see is not left on the screen.
      if (error instanceof Refused && [401, 403].includes(error.status)) this._tree.replace([]);
      this._render();
      byId("prefix-empty").hidden = true;
      this._say(explain(error));
      return;
    }
    if (turn !== this._turn) return;
    this._tree.replace(reports);
    this._arrived(page, cursor);
  }

  async _more() {
    if (this._busy || !this._cursor) return;
    this._busy = true;
    const turn = this._turn;
    try {
      const page = await get("admin/cache/prefixes", this._query(this._cursor));
      if (turn !== this._turn) return;
      this._tree.add(page.prefixes);
      this._numPages = Math.min(this._numPages + 1, MOST_PAGES);
      this._arrived(page, page.next_cursor);
    } catch (error) {
      this._say(explain(error));
    } finally {
      this._busy = false;
    }
  }

  _arrived(page, cursor) {
    this._cursor = cursor;
    this._total = page.num_total;
    byId("more").hidden = !cursor;
    this._say("");
    this._render();
  }

  _say(text) {
    setText(byId("prefix-problem"), text);
  }

  _render() {
    const rows = this._tree.rows(ORDERS[byId("filters").elements.order.value]);
    const kept = new Map();
    const body = byId("prefix-rows");
    let before = body.firstChild;
    for (const row of rows) {
      const shown = this._rows.get(row.report.id) ?? new Row(this);
      kept.set(row.report.id, shown);
      shown.update(row);
      // Moving a row would take the focus from it.
      if (shown.node === before) before = before.nextSibling;
      else body.insertBefore(shown.node, before);
    }
    for (const [id, row] of this._rows) if (!kept.has(id)) row.node.remove();
    this._rows = kept;
    const filtered = Object.entries(this._query(null)).some(
      ([name, value]) => !["limit", "cursor"].includes(name) && value,
    );
    // A server with very many does not count them.
    const all = this._total === null ? "more branches" : counted(this._total, "branch", "branches");
    setText(byId("prefix-count"), rows.length ? `${count(this._tree.size)} of ${all}` : "");
    const empty = byId("prefix-empty");
    empty.hidden = rows.length > 0;
    setText(
      empty,
      filtered
        ? "No branch fits these filters."
        : "Nothing cached yet: send a request whose prompt fills at least one block.",
    );
    byId("prefix-table").hidden = rows.length === 0;
  }

  async toggle(report) {
    this._tree.toggle(report.id);
    this._render();
    // Children may lie on later pages.
    for (let i = 0; i < MOST_PAGES && this._tree.isOpen(report.id) && this._cursor; i += 1) {
      if (this._tree.childrenOf(report.id).length >= report.num_children) break;
      await this._more();
    }
  }

  async showParent(report) {
    try {
      const detail = await get(`admin/cache/prefixes/${encodeURIComponent(report.parent)}`);
      this._tree.add([detail.prefix]);
      this._render();
      this._rows.get(detail.prefix.id)?.node.querySelector(".link").focus();
    } catch (error) {
      this._say(explain(error));
    }
  }

  open(id) {
    openDetail(id, this);
  }

  /** After a dialog: `done` resolves to whether something was changed. */
  async act(done) {
    if (await done) {
      await Promise.all([this.refresh(), this._changed()]);
      return true;
    }
    return false;
  }
}
