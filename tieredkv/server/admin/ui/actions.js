// Everything the page can change on the server, each behind a question: pin, unpin, clear, warm, cancel, flush, verify.

import { Refused, post, remove } from "./api.js";
import { ask, choice, field, tell } from "./dialogs.js";
import { element } from "./dom.js";
import { bytes, count, counted, shortHash } from "./format.js";

const LONG_MS = 120000;
const TTLS = [
  ["", "until it is unpinned"],
  ["300", "5 minutes"],
  ["3600", "1 hour"],
  ["86400", "1 day"],
  ["604800", "7 days"],
];
const TIER_NAMES = { device: "Device", host: "Host", disk: "Disk" };

export function titleOf(prefix) {
  if (prefix.name) return prefix.name;
  if (prefix.first_words) return prefix.first_words;
  return shortHash(prefix.id);
}

/** The sentence that a pin's report amounts to. */
function describePin(pin) {
  const kept = `${count(pin.num_pinned_tokens)} of ${counted(pin.num_tokens, "token")}`;
  const where =
    pin.num_missing || pin.num_loading
      ? `, ${count(pin.num_missing + pin.num_loading)} of its blocks are on their way`
      : "";
  const reason = pin.reason ? ` (${pin.reason})` : "";
  return `Pin ${pin.name ?? shortHash(pin.id)} ${pin.outcome}: ${kept} kept in ${pin.tier} or above${where}${reason}.`;
}

function pinFields(tiers, name) {
  const lower = tiers.filter((tier) => tier.enabled).map((tier) => [tier.tier, `${tier.tier} or above`]);
  return [
    field("Name", element("input", { name: "name", value: name ?? "", maxlength: 200, autocomplete: "off" })),
    field("Keep it", choice("ttl", TTLS)),
    field("Where", choice("tier", [["", "in the lowest tier there is, or above"], ...lower])),
  ];
}

async function pin(source, values) {
  const body = { ...source };
  if (values.name) body.name = values.name;
  if (values.ttl) body.ttl = Number(values.ttl);
  if (values.tier) body.tier = values.tier;
  const made = await post("admin/pins", body, LONG_MS);
  tell(describePin(made), made.outcome === "accepted" ? "good" : "warning");
}

export function askToPin(prefix, tiers) {
  return ask({
    title: "Pin this prefix?",
    content: [
      element(
        "p",
        {},
        `All ${counted(prefix.num_tokens, "token")} from the beginning to the end of “${titleOf(prefix)}” stay cached.`,
      ),
      ...pinFields(tiers, prefix.name),
    ],
    confirm: "Pin",
    submit: (values) => pin({ prefix: prefix.id }, values),
  });
}

/** `source`: { prompt | messages | tokens, cache_salt?, tenant? }. */
export function askToPinPrompt(source, tiers) {
  return ask({
    title: "Pin this prompt?",
    content: [
      element("p", {}, "Its full blocks stay cached; those that are missing are computed."),
      ...pinFields(tiers, null),
    ],
    confirm: "Pin",
    submit: (values) => pin(source, values),
  });
}

export function askToUnpin(report) {
  return ask({
    title: "Unpin?",
    content: [
      element(
        "p",
        {},
        `The ${counted(report.num_blocks, "block")} (${bytes(report.nbytes)}) of “${report.name ?? shortHash(report.id)}” stay cached until room is needed.`,
      ),
    ],
    confirm: "Unpin",
    submit: async () => {
      await remove(`admin/pins/${encodeURIComponent(report.id)}`);
      tell(`Pin ${report.name ?? shortHash(report.id)} is gone.`);
    },
  });
}

export function askToWarm(source) {
  return ask({
    title: "Warm this prompt?",
    content: [
      element("p", {}, "A job computes what of it is not cached, beside the running requests."),
      field("Name", element("input", { name: "name", maxlength: 200, autocomplete: "off" })),
    ],
    confirm: "Warm",
    submit: async (values) => {
      const name = values.name ? { name: values.name } : {};
      const job = await post("admin/cache/warm", { prompts: [{ ...source, ...name }], ...name });
      tell(`Job ${job.name ?? job.id} is ${job.state}.`);
    },
  });
}

export function askToCancel(job) {
  return ask({
    title: "Cancel this job?",
    content: [
      element(
        "p",
        {},
        `“${job.name ?? job.id}” has done ${count(job.num_prompts_done)} of ${counted(job.num_prompts, "prompt")}; what it computed stays cached.`,
      ),
    ],
    confirm: "Cancel the job",
    danger: true,
    submit: async () => {
      const report = await remove(`admin/jobs/${encodeURIComponent(job.id)}`);
      tell(`Job ${job.name ?? job.id} is ${report.state}.`);
    },
  });
}

function describeRemoval(verb, report) {
  const parts = report.tiers.map((tier) => {
    const stayed = [
      tier.in_use ? `${count(tier.in_use)} in use stay` : null,
      tier.pinned ? `${count(tier.pinned)} pinned stay` : null,
      tier.error,
    ].filter(Boolean);
    return `${tier.tier} ${counted(tier.removed, "block")} ${verb}${stayed.length ? ` (${stayed.join(", ")})` : ""}`;
  });
  return `${report.complete ? "Done" : "Not all of it"}: ${parts.join("; ") || "there was nothing to do"}.`;
}

/** The report of a removal that was not complete comes inside the error. */
function reportIn(body) {
  if (Array.isArray(body?.tiers)) return body;
  return Object.values(body?.error ?? {}).find((value) => Array.isArray(value?.tiers)) ?? null;
}

/** Clear a branch with all that continues it, or, without `prefix`, whole tiers. */
export function askToClear(tiers, prefix = null) {
  const boxes = tiers
    .filter((tier) => tier.enabled)
    .map((tier) =>
      element(
        "label",
        { class: "check" },
        element("input", { type: "checkbox", name: "tiers", value: tier.tier, checked: true }),
        TIER_NAMES[tier.tier],
      ),
    );
  const what = prefix
    ? `The blocks of “${titleOf(prefix)}”, and of everything that continues it, are removed from these tiers.`
    : "Everything that is not pinned and not in use is removed from these tiers, for all tenants unless one is named.";
  const tenant = field(
    "Tenant",
    element("input", { name: "tenant", autocomplete: "off", placeholder: "all" }),
    "the label in the list of prefixes",
  );
  return ask({
    title: prefix ? "Clear this prefix?" : "Clear the cache?",
    content: [
      element("p", {}, what, " Later requests compute them again."),
      boxes.length ? element("fieldset", {}, element("legend", {}, "Tiers"), boxes) : null,
      prefix ? null : tenant,
    ],
    confirm: "Clear",
    danger: true,
    submit: async (values, data) => {
      const chosen = data.getAll("tiers");
      if (boxes.length && !chosen.length) throw new Refused("Choose at least one tier.", 400, null);
      const body = boxes.length ? { tiers: chosen } : {};
      if (prefix) body.prefix = prefix.id;
      if (values.tenant) body.tenant = values.tenant;
      try {
        tell(describeRemoval("removed", await post("admin/cache/clear", body, LONG_MS)));
      } catch (error) {
        const report = error instanceof Refused && error.status === 409 ? reportIn(error.body) : null;
        if (!report) throw error;
        tell(describeRemoval("removed", report), "warning");
      }
    },
  });
}

export function askToFlush() {
  return ask({
    title: "Save everything now?",
    content: [
      element(
        "p",
        {},
        "Blocks that only the device or the host holds are written to the lowest tier, as before a restart.",
      ),
    ],
    confirm: "Save",
    submit: async () => {
      await post("admin/cache/flush", { timeout: 60 }, LONG_MS);
      tell("All blocks are saved.");
    },
  });
}

export function askToVerify() {
  return ask({
    title: "Verify all tiers?",
    content: [
      element(
        "p",
        {},
        "Every stored block is read and checked. On a large store this takes a while and some disk bandwidth.",
      ),
    ],
    confirm: "Verify",
    submit: async () => {
      const report = await post("admin/cache/verify", {}, 600000);
      const found = report.findings.map((f) => `${f.tier}: ${f.text}${f.repaired ? " (repaired)" : ""}`).join("; ");
      tell(
        `${counted(report.num_checked, "block")} checked: ${report.ok ? "all is well" : "not all is well"}${found ? `: ${found}` : ""}.`,
        report.ok ? "good" : "warning",
      );
    },
  });
}
