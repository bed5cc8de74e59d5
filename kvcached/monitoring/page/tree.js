// The prefix tree as boxes below boxes: a box is a run, and as wide as the blocks that it and the runs below it have.

import { byId, element, setText } from "./dom.js";
import { count, namespaceName, plural } from "./format.js";

const LEVELS_MAX = 12;
/** Narrower boxes are drawn as one. */
const BOX_PX_MIN = 3;
/** Narrower ones have no text. */
const TEXT_PX_MIN = 26;
const ROW_PX = 26;

export class TreePicture {
  constructor() {
    this.place = byId("tree");
    this.boxes = new Map(); // elements by the id of what they show
    this.zoomed = ["all"]; // ids from the whole to what fills the width
    this.focused = null;
    this.place.addEventListener("keydown", (event) => this.#press(event));
    new ResizeObserver(() => this.root && this.#layOut()).observe(this.place);
  }

  show(answer) {
    this.root = wholeOf(answer.trees);
    this.byId = new Map();
    index(this.root, this.byId);
    this.coldest = Math.max(1, ...answer.trees.flatMap((tree) => tree.shown.map((run) => run.idle)));
    while (!this.byId.has(this.zoomed.at(-1))) this.zoomed.pop(); // the whole is always there
    this.zoomed = pathTo(this.byId.get(this.zoomed.at(-1)));
    this.#layOut();
    setText(byId("tree-words"), summary(answer.trees));
  }

  #zoomTo(node) {
    if (node.rest) return;
    this.zoomed = pathTo(node);
    this.focused = node.id;
    this.#layOut();
    this.boxes.get(node.id)?.focus({ preventScroll: true });
  }

  #zoomOut() {
    const { above } = this.byId.get(this.zoomed.at(-1));
    if (above) this.#zoomTo(above);
  }

  #layOut() {
    const top = this.byId.get(this.zoomed.at(-1));
    this.shown = [];
    this.#lay(top, 0, 0, 1, this.place.clientWidth);
    const kept = new Set(this.shown.map(({ node }) => node.id));
    for (const [id, box] of this.boxes) if (!kept.has(id)) this.#drop(id, box);
    if (!kept.has(this.focused)) this.focused = top.id;
    for (const each of this.shown) this.#draw(each);
    this.#order();
    this.place.style.height = `${ROW_PX * (1 + Math.max(...this.shown.map(({ level }) => level)))}px`;
    this.#crumbs();
    this.#tell(this.byId.get(this.focused) ?? top);
  }

  #lay(node, level, left, width, pixels) {
    this.shown.push({ node, level, left, width });
    if (level >= LEVELS_MAX || !node.total) return;
    const part = (total) => (width * total) / node.total;
    let [at, hidden, hiddenTotal] = [left, node.hidden, node.hiddenTotal];
    for (const child of node.below) {
      if (part(child.total) * pixels < BOX_PX_MIN) {
        hidden += 1;
        hiddenTotal += child.total;
        continue;
      }
      this.#lay(child, level + 1, at, part(child.total), pixels);
      at += part(child.total);
    }
    if (hidden > 0 && part(hiddenTotal) * pixels >= 1) {
      const rest = { id: `${node.id}/rest`, rest: true, above: node, total: hiddenTotal, runs: hidden, below: [] };
      this.byId.set(rest.id, rest);
      this.shown.push({ node: rest, level: level + 1, left: at, width: part(hiddenTotal) });
    }
  }

  /** Readers of the screen read elements in their order: each box before those below it. */
  #order() {
    const active = document.activeElement;
    this.shown.forEach(({ node }, number) => {
      const [box, there] = [this.boxes.get(node.id), this.place.children[number]];
      if (box !== there) this.place.insertBefore(box, there ?? null);
    });
    if (this.place.contains(active) && active !== document.activeElement) active.focus({ preventScroll: true });
  }

  #drop(id, box) {
    if (box === document.activeElement) this.place.focus();
    box.remove();
    this.boxes.delete(id);
  }

  #draw({ node, level, left, width }) {
    let box = this.boxes.get(node.id);
    if (!box) {
      box = element("div", "box", [element("span")]);
      box.dataset.id = node.id;
      box.setAttribute("role", "treeitem");
      box.addEventListener("click", () => this.#click(node.id));
      box.addEventListener("focus", () => this.#focus(node.id));
      box.addEventListener("pointerenter", () => this.#tell(this.byId.get(node.id)));
      this.boxes.set(node.id, box);
      this.place.append(box);
    }
    box.classList.toggle("rest", Boolean(node.rest));
    box.classList.toggle("group", Boolean(node.isGroup));
    box.classList.toggle("run", Boolean(node.run));
    box.tabIndex = node.id === this.focused ? 0 : -1;
    box.style.left = `${100 * left}%`;
    box.style.width = `${100 * width}%`;
    box.style.top = `${ROW_PX * level}px`;
    for (const [name, value] of Object.entries(colours(node, this.coldest))) box.style.setProperty(name, value);
    box.setAttribute("aria-level", String(depthOf(node)));
    box.setAttribute("aria-label", told(node));
    if (node.below.length) box.setAttribute("aria-expanded", "true");
    else box.removeAttribute("aria-expanded");
    setText(box.firstChild, width * this.place.clientWidth < TEXT_PX_MIN ? "" : title(node));
  }

  #crumbs() {
    const nodes = this.zoomed.map((id) => this.byId.get(id));
    const place = byId("crumbs");
    const wanted = nodes.map(title).join("\n");
    if (place.dataset.shows === wanted) return;
    place.dataset.shows = wanted;
    place.replaceChildren(
      ...nodes.map((node, number) => {
        const isLast = number === nodes.length - 1;
        const crumb = element(isLast ? "span" : "button", "crumb", title(node));
        if (!isLast) crumb.addEventListener("click", () => this.#zoomTo(this.byId.get(node.id) ?? this.root));
        return crumb;
      }),
    );
  }

  #click(id) {
    if (id === this.zoomed.at(-1)) this.#zoomOut();
    else this.#zoomTo(this.byId.get(id));
  }

  #focus(id) {
    if (this.focused !== id && this.boxes.has(this.focused)) this.boxes.get(this.focused).tabIndex = -1;
    this.focused = id;
    this.boxes.get(id).tabIndex = 0;
    this.#tell(this.byId.get(id));
  }

  #press(event) {
    if (!this.root || event.ctrlKey || event.metaKey || event.altKey) return;
    const node = this.byId.get(this.focused);
    const moves = {
      ArrowDown: () => this.#below(node),
      ArrowUp: () => (node.id === this.zoomed.at(-1) ? null : node.above),
      ArrowRight: () => this.#beside(node, 1),
      ArrowLeft: () => this.#beside(node, -1),
    };
    if (event.key in moves) this.boxes.get(moves[event.key]()?.id)?.focus();
    else if (event.key === "Enter" || event.key === " ") this.#click(node.id);
    else if (event.key === "Escape" || event.key === "Backspace") this.#zoomOut();
    else if (event.key === "Home") this.#zoomTo(this.root);
    else return;
    event.preventDefault();
  }

  #below(node) {
    return this.shown.find((each) => each.node.above === node)?.node;
  }

  #beside(node, step) {
    const siblings = this.shown.filter((each) => each.node.above === node.above).map((each) => each.node);
    return siblings[siblings.indexOf(node) + step];
  }

  #tell(node) {
    if (node) setText(byId("tree-detail"), told(node));
  }
}

/** All trees, below one root. Trees without blocks are left out. */
function wholeOf(trees) {
  const root = { id: "all", isGroup: true, above: null, below: [], hidden: 0, hiddenTotal: 0, total: 0 };
  trees.forEach((tree, number) => {
    if (!tree.blocks) return;
    const node = { id: `tree ${number} ${tree.namespace}`, isGroup: true, tree, above: root, below: [], total: tree.blocks };
    const runs = [];
    for (const run of tree.shown) {
      const above = run.above < 0 ? node : runs[run.above];
      const made = { id: `${node.id} ${run.name}`, run, tree, above, below: [], total: run.blocks + run.below };
      above.below.push(made);
      runs.push(made);
    }
    node.total = Math.max(tree.blocks, totalBelow(node));
    for (const each of [node, ...runs]) {
      each.hidden = Math.max((each.run ? each.run.children : tree.chains) - each.below.length, 0);
      each.hiddenTotal = Math.max((each.run ? each.run.below : node.total) - totalBelow(each), 0);
    }
    root.below.push(node);
  });
  root.below.sort((one, other) => other.total - one.total);
  root.total = totalBelow(root);
  return root;
}

const totalBelow = (node) => node.below.reduce((sum, child) => sum + child.total, 0);

function index(node, byId) {
  const waiting = [node];
  while (waiting.length) {
    const each = waiting.pop();
    byId.set(each.id, each);
    waiting.push(...each.below);
  }
}

function pathTo(node) {
  const path = [];
  for (let at = node; at; at = at.above) path.unshift(at.id);
  return path;
}

const depthOf = (node) => pathTo(node).length;

/** Which part of a run lies where, and how hot it is: 1 just used, 0 the coldest of all. */
function colours({ run, tree }, coldest) {
  if (!run) return {};
  const share = (blocks) => `${(100 * blocks) / run.blocks}%`;
  const device = Math.max(0, ...tree.replicas.map((name) => run.held[name] ?? 0));
  const heat = 1 - Math.log1p(run.idle) / Math.log1p(coldest);
  const host = tree.pools.slice(tree.replicas.length).reduce((sum, name) => sum + (run.held[name] ?? 0), 0);
  return { "--in-device": share(device), "--in-host": share(host), "--heat": heat.toFixed(3) };
}

function title(node) {
  if (node.rest) return `+ ${count(node.runs)}`;
  if (node.run) return plural(node.run.blocks, "block");
  return node.tree ? namespaceName(node.tree) : "all namespaces";
}

/** All that is known of a box, in words. */
function told(node) {
  if (node.rest) return `${plural(node.runs, "run")} not shown one by one, ${plural(node.total, "block")} with those below`;
  const { run, tree, total } = node;
  if (!tree) return `All namespaces: ${plural(total, "block")}`;
  if (!run) return `Namespace ${namespaceName(tree)} (${tree.namespace}): ${plural(total, "block")} in ${plural(tree.runs, "run")}`;
  const copies = tree.pools.filter((pool) => run.held[pool]).map((pool) => `${pool} ${count(run.held[pool])}`);
  return [
    `Blocks ${count(run.start)} to ${count(run.start + run.blocks - 1)}, ${plural(run.blocks, "block")}`,
    `copies: ${copies.join(", ") || "none yet"}`,
    ...(run.pins ? [`leases and copies that end here: ${count(run.pins)}`] : []),
    `${plural(run.children, "continuation")}, ${plural(run.below, "block")} below`,
    run.idle ? `touches of its pool since: ${count(run.idle)}` : "used last of its pool",
    `name ${run.name}`,
  ].join(" · ");
}

function summary(trees) {
  const sum = (name) => trees.reduce((total, tree) => total + tree[name], 0);
  const [runs, looked] = [sum("runs"), sum("looked")];
  const shown = trees.reduce((total, tree) => total + tree.shown.length, 0);
  if (!runs) return "The index is empty.";
  const left = looked < runs ? ` The index is large: ${count(runs - looked)} runs were not looked at, and are in no figure here.` : "";
  return `${plural(runs, "run")}, ${plural(sum("blocks"), "block")}; the ${count(shown)} largest and latest used runs have boxes.${left}`;
}
