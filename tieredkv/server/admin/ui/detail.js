// One branch of the prefix tree: its figures, its pins and its blocks.

import { explain, get } from "./api.js";
import { askToClear, askToPin, askToUnpin, titleOf } from "./actions.js";
import { openDialog } from "./dialogs.js";
import { element, fact, fill, table } from "./dom.js";
import { ago, bytes, count, counted, shortHash, until } from "./format.js";
import { TIERS } from "./history.js";

const FIRST_BLOCKS = 100;

function facts(prefix) {
  return element(
    "dl",
    { class: "facts" },
    fact("Id", element("code", {}, prefix.id)),
    fact("Tenant", prefix.tenant),
    fact("Tokens", `${count(prefix.num_tokens)}, of which ${count(prefix.num_own_tokens)} in this branch`),
    fact("Blocks", `${counted(prefix.num_blocks, "block")}, ${bytes(prefix.nbytes)}`),
    fact("Continues", prefix.parent ? element("code", {}, shortHash(prefix.parent)) : "the beginning"),
    fact("Continued by", counted(prefix.num_children, "branch", "branches")),
    fact("Hits", count(prefix.num_hits)),
    fact("Last used", ago(prefix.last_use_s)),
    fact("Priority", prefix.priority === null ? "ordinary" : `${prefix.priority}, expires ${until(prefix.expires_s)}`),
    prefix.first_words ? fact("Begins", `“${prefix.first_words}”`) : null,
    prefix.last_words ? fact("Ends", `“${prefix.last_words}”`) : null,
  );
}

function blockTable(blocks) {
  return table(
    "Blocks of this branch, from its head",
    [">Block", "Hash", ...TIERS, ">Size", ">Hits", ">In use", ">Pins", ">Last used"],
    blocks.map((block) => [
      count(block.depth),
      element("code", {}, shortHash(block.hash)),
      ...TIERS.map((tier) =>
        block.tiers[tier]
          ? element("span", { class: "mark" }, element("span", { class: `swatch tone-${tier}` }), block.tiers[tier])
          : "–",
      ),
      bytes(block.nbytes),
      count(block.num_hits),
      count(block.ref_count),
      count(block.num_pins),
      ago(block.last_use_s),
    ]),
  );
}

/** `view` is the list the branch was opened from: it knows tiers and pins, and `act` refreshes it. */
export async function openDetail(id, view) {
  const content = element(
    "div",
    { class: "detail", "aria-busy": "true" },
    element("p", { class: "empty" }, "Loading."),
  );
  const close = element("button", { type: "button", onclick: () => dialog.close() }, "Close");
  const buttons = element("div", { class: "buttons" });
  const dialog = openDialog("Prefix", content, element("div", { class: "buttons end" }, buttons, close));
  dialog.classList.add("wide");
  const heading = dialog.querySelector("h2");

  async function load() {
    let detail;
    try {
      detail = await get(`admin/cache/prefixes/${encodeURIComponent(id)}`);
    } catch (error) {
      fill(content, element("p", { class: "problem", role: "alert" }, explain(error)));
      fill(buttons);
      return;
    } finally {
      content.setAttribute("aria-busy", "false");
    }
    const { prefix, blocks } = detail;
    fill(heading, titleOf(prefix));
    const first = blocks.slice(0, FIRST_BLOCKS);
    const list = element(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Blocks" },
      blockTable(first),
    );
    const rest =
      blocks.length > first.length
        ? element(
            "button",
            {
              type: "button",
              onclick: () => {
                fill(list, blockTable(blocks));
                rest.remove();
              },
            },
            `Show all ${counted(blocks.length, "block")}`,
          )
        : null;
    fill(content, facts(prefix), element("h3", {}, "Blocks"), list, rest);
    fill(
      buttons,
      element(
        "button",
        { type: "button", class: "primary", onclick: () => change(askToPin(prefix, view.tiers())) },
        "Pin…",
      ),
      view
        .pins()
        .filter((pin) => prefix.pins.includes(pin.id))
        .map((pin) =>
          element(
            "button",
            { type: "button", onclick: () => change(askToUnpin(pin)) },
            `Unpin ${pin.name ?? shortHash(pin.id)}…`,
          ),
        ),
      element(
        "button",
        { type: "button", class: "danger", onclick: () => change(askToClear(view.tiers(), prefix)) },
        "Clear…",
      ),
    );
  }

  async function change(done) {
    if ((await view.act(done)) && dialog.open) await load();
  }

  await load();
}
