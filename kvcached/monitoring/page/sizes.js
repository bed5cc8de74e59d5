// What host pools of other sizes would hit: a line for each namespace over the sizes, a sentence, and a table.

import { emptyDrawing, grid, HEIGHT, levelOf, WIDTH } from "./charts.js";
import { byId, drawn, element, fillTable, setText } from "./dom.js";
import { bytes, count, namespaceName, percent, plural } from "./format.js";

/** A colour for each line; more would not be told apart. The table has all namespaces. */
const LINES = ["first", "second", "storage", "device", "host"];
const drawing = emptyDrawing();

export function fillSizes(report) {
  const known = report.hosts.filter((host) => host.hit_estimates.length);
  for (const name of ["sizes-shown", "sizes-legend"]) byId(name).hidden = !known.length;
  if (!known.length) {
    setText(byId("sizes-words"), whyNone(report));
    return;
  }
  const byAsked = [...known].sort((one, other) => other.asked_blocks - one.asked_blocks);
  const kept = byAsked.slice(0, LINES.length);
  const lines = known.filter((host) => kept.includes(host)); // in the order of the report: a line keeps its colour
  const ratios = known[0].hit_estimates.map(([ratio]) => ratio);
  setText(byId("sizes-words"), largestGain(byAsked[0], report.host_pool_bytes));
  draw(lines, ratios);
  fillLegend(lines, known.length - lines.length);
  fillTicks(ratios, report.host_pool_bytes);
  fillFigures(report, ratios);
}

function whyNone({ host_pool_bytes, hosts }) {
  if (!host_pool_bytes) return "This daemon has no host pool: a [host] table in its configuration makes one.";
  if (!hosts.length) return "No engine has used the host pool yet.";
  return "Too few blocks were sampled for an estimate yet: it comes when engines have sent more requests.";
}

/** The smallest of the sizes that hit most, in whole points. */
function largestGain(host, poolBytes) {
  const now = hitsNow(host);
  const gains = host.hit_estimates.map(([ratio, hits]) => ({ ratio, hits, points: Math.round(100 * (hits - now)) }));
  const points = Math.max(...gains.map((each) => each.points));
  const best = points > 0 ? gains.find((each) => each.points === points) : gains.at(-1);
  const gain = points > 0 ? `${plural(points, "point")} more than` : "no more than";
  return `${namespaceName(host)}: ${bytes(best.ratio * poolBytes)} would hit ${percent(best.hits)}, ${gain} ${bytes(poolBytes)}, the size now.`;
}

const hitsNow = (host) => host.hit_estimates.find(([ratio]) => ratio === 1)[1];

/** Where a size is, from 0 to 1: equal steps are equal factors. */
function placeOf(ratio, ratios) {
  const [first, last] = [ratios[0], ratios.at(-1)].map(Math.log);
  return (Math.log(ratio) - first) / (last - first);
}

function draw(hosts, ratios) {
  const place = byId("sizes-plot");
  if (drawing.parentNode !== place) place.prepend(drawing);
  drawing.setAttribute("aria-label", "Hits over the size of the host pool. The table below has the figures.");
  const x = (ratio) => (WIDTH * placeOf(ratio, ratios)).toFixed(1);
  const now = drawn("line", { class: "mark", x1: x(1), x2: x(1), y1: 0, y2: HEIGHT });
  const lines = hosts.flatMap((host, number) => {
    const points = host.hit_estimates.map(([ratio, hits]) => `${x(ratio)},${levelOf(hits).toFixed(1)}`);
    return [
      drawn("path", { class: `line ${LINES[number]}`, d: `M${points.join("L")}` }),
      drawn("path", { class: `line dots ${LINES[number]}`, d: points.map((point) => `M${point}h0`).join("") }),
    ];
  });
  drawing.replaceChildren(...grid(), now, ...lines);
}

function fillLegend(hosts, left) {
  const entries = hosts.map((host, number) => [LINES[number], `${namespaceName(host)} ${percent(hitsNow(host))} now`]);
  if (left) entries.push(["", `${count(left)} more in the table`]);
  const legend = byId("sizes-legend");
  while (legend.children.length > entries.length) legend.lastChild.remove();
  entries.forEach(([className, text], number) => {
    const entry = legend.children[number] ?? legend.appendChild(element("span", "", [element("span"), element("span")]));
    entry.firstChild.className = className && `key ${className}`;
    setText(entry.lastChild, text);
  });
}

/** Each doubling has its size below the lines. */
function fillTicks(ratios, poolBytes) {
  const ticks = byId("sizes-ticks");
  const shown = ratios.filter((ratio) => Number.isInteger(Math.log2(ratio)));
  while (ticks.children.length > shown.length) ticks.lastChild.remove();
  shown.forEach((ratio, number) => {
    const tick = ticks.children[number] ?? ticks.appendChild(element("span"));
    tick.className = ratio === 1 ? "now" : "";
    tick.style.left = `${100 * placeOf(ratio, ratios)}%`;
    setText(tick, sizeOf(ratio, poolBytes));
  });
}

const sizeOf = (ratio, poolBytes) => `${bytes(ratio * poolBytes)}${ratio === 1 ? " now" : ""}`;

function fillFigures(report, ratios) {
  const rows = report.hosts.map((host) => [
    namespaceName(host),
    ...ratios.map((_, place) => (host.hit_estimates.length ? percent(host.hit_estimates[place][1]) : "–")),
    count(host.asked_blocks),
  ]);
  const sizes = ratios.map((ratio) => [sizeOf(ratio, report.host_pool_bytes), true]);
  fillTable(byId("sizes"), [["namespace"], ...sizes, ["blocks asked for", true]], rows, "none");
}
