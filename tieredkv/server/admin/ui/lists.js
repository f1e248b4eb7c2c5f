// The lists of pins and of warming jobs.

import { askToCancel, askToUnpin } from "./actions.js";
import { byId, element, fill, setText } from "./dom.js";
import { bytes, clock, compact, count, shortHash, until } from "./format.js";
import { tell } from "./dialogs.js";

const OVER = ["done", "cancelled", "failed"];

/** Keeps a row a record by its id, so that the focus stays where it is while numbers change. */
class Rows {
  constructor(body, make) {
    this._body = body;
    this._make = make;
    this._rows = new Map();
  }

  show(records) {
    const kept = new Map();
    let before = this._body.firstChild;
    for (const record of records) {
      const row = this._rows.get(record.id) ?? this._make(record);
      kept.set(record.id, row);
      row.update(record);
      if (row.node === before) before = before.nextSibling;
      else this._body.insertBefore(row.node, before);
    }
    for (const [id, row] of this._rows) if (!kept.has(id)) row.node.remove();
    this._rows = kept;
  }
}

function pinRow(first, act) {
  let pin = first;
  const name = element("th", { scope: "row" });
  const cells = ["outcome", "tokens", "blocks", "size", "tier", "expires"].map((key) =>
    element("td", { class: ["tokens", "blocks", "size"].includes(key) ? "number" : null }),
  );
  const button = element("button", { type: "button", onclick: () => act(askToUnpin(pin)) }, "Unpin");
  const node = element("tr", {}, name, cells, element("td", {}, button));
  return {
    node,
    update(record) {
      pin = record;
      const title = pin.name ?? shortHash(pin.id);
      fill(name, title, element("span", { class: "quiet" }, ` ${pin.tenant}`));
      setText(cells[0], pin.reason ? `${pin.outcome}: ${pin.reason}` : pin.outcome);
      setText(cells[1], `${count(pin.num_pinned_tokens)} of ${count(pin.num_tokens)}`);
      const absent = [
        pin.num_loading ? `${count(pin.num_loading)} loading` : null,
        pin.num_missing ? `${count(pin.num_missing)} missing` : null,
      ].filter(Boolean);
      setText(
        cells[2],
        `${count(pin.num_present)} of ${count(pin.num_blocks)}${absent.length ? `, ${absent.join(", ")}` : ""}`,
      );
      setText(cells[3], bytes(pin.nbytes));
      setText(cells[4], pin.tier);
      setText(cells[5], until(pin.expires_s));
      button.setAttribute("aria-label", `Unpin ${title}`);
    },
  };
}

function jobRow(first, act) {
  let job = first;
  const name = element("th", { scope: "row" });
  const state = element("td");
  const bar = element("progress", { max: 1, value: 0 });
  const progress = element("span", { class: "quiet" });
  const computed = element("td", { class: "number" });
  const began = element("td", { class: "number" });
  const button = element("button", { type: "button", onclick: () => act(askToCancel(job)) }, "Cancel");
  const node = element(
    "tr",
    {},
    name,
    state,
    element("td", {}, bar, progress),
    computed,
    began,
    element("td", {}, button),
  );
  return {
    node,
    update(record) {
      job = record;
      const title = job.name ?? job.id;
      setText(name, title);
      setText(state, job.error ? `${job.state}: ${job.error}` : job.state);
      const share =
        job.num_tokens > 0
          ? job.num_tokens_done / job.num_tokens
          : job.num_prompts > 0
            ? job.num_prompts_done / job.num_prompts
            : 0;
      bar.value = share;
      bar.setAttribute("aria-label", `Progress of ${title}`);
      setText(progress, ` ${count(job.num_prompts_done)} of ${count(job.num_prompts)} prompts`);
      setText(computed, compact(job.num_tokens_computed));
      setText(began, clock(job.created_s));
      button.hidden = OVER.includes(job.state);
      button.setAttribute("aria-label", `Cancel ${title}`);
    },
  };
}

export class Lists {
  /** `act(done)` waits for a dialog and refreshes the page. */
  constructor(act) {
    this._pins = new Rows(byId("pin-rows"), (pin) => pinRow(pin, act));
    this._jobs = new Rows(byId("job-rows"), (job) => jobRow(job, act));
    this._states = new Map();
  }

  showPins(pins) {
    this._pins.show(pins);
    byId("pin-empty").hidden = pins.length > 0;
    byId("pin-table").hidden = pins.length === 0;
  }

  showJobs(jobs) {
    const newest = [...jobs].sort((a, b) => b.created_s - a.created_s);
    this._jobs.show(newest);
    byId("job-empty").hidden = jobs.length > 0;
    byId("job-table").hidden = jobs.length === 0;
    for (const job of jobs) {
      const before = this._states.get(job.id);
      if (before && before !== job.state && OVER.includes(job.state)) {
        tell(`Job ${job.name ?? job.id} is ${job.state}.`, job.state === "failed" ? "warning" : "good");
      }
      this._states.set(job.id, job.state);
    }
  }
}
