// The prefix tree out of the server's flat list of branches. Knows no element and no server.

export class Tree {
  constructor() {
    this._branches = new Map();
    this._closed = new Set();
  }

  /** Take `reports` as all there is, in their order; what was closed stays closed. */
  replace(reports) {
    this._branches = new Map(reports.map((report) => [report.id, report]));
  }

  add(reports) {
    for (const report of reports) this._branches.set(report.id, report);
  }

  get(id) {
    return this._branches.get(id) ?? null;
  }

  get size() {
    return this._branches.size;
  }

  toggle(id) {
    if (!this._closed.delete(id)) this._closed.add(id);
  }

  isOpen(id) {
    return !this._closed.has(id);
  }

  childrenOf(id) {
    return this._children().get(id) ?? [];
  }

  _children() {
    const children = new Map();
    for (const report of this._branches.values()) {
      const parent = this._branches.has(report.parent) ? report.parent : null;
      if (!children.has(parent)) children.set(parent, []);
      children.get(parent).push(report);
    }
    return children;
  }

  /**
   * What to show, from the top, siblings by `order`: [{ report, level, open, numMissing, isOrphan }]. level 1 is the outermost; numMissing
   * children of the branch are not here, because they do not fit the filters or are on a later page; an orphan continues a
   * branch that is not here.
   */
  rows(order) {
    const children = this._children();
    for (const siblings of children.values()) siblings.sort(order);
    const rows = [];
    const pending = [...(children.get(null) ?? [])].reverse().map((report) => [report, 1]);
    while (pending.length) {
      const [report, level] = pending.pop();
      const own = children.get(report.id) ?? [];
      const open = this.isOpen(report.id);
      rows.push({
        report,
        level,
        open,
        numMissing: report.num_children - own.length,
        isOrphan: level === 1 && report.parent !== null,
      });
      if (open) for (const child of [...own].reverse()) pending.push([child, level + 1]);
    }
    return rows;
  }
}
