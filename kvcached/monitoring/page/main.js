// Asks the daemon while somebody looks, and shows what it says.

import { Chart } from "./charts.js";
import { byId, element, fillBar, setText } from "./dom.js";
import { bytes, count, duration, latency, percent, plural, rate, words } from "./format.js";
import { copied, grown, History, hits, quantile } from "./history.js";
import { fillSizes } from "./sizes.js";
import { fillTables, pools } from "./tables.js";
import { TreePicture } from "./tree.js";

const STATUS_MS = 1000;
const TREE_MS = 5000;
const PATIENCE_MS = 5000;
const MINUTE_S = 60;
/** Lines for device pools; more would not be told apart. */
const DEVICES_MAX = 4;
/** Counters that mean trouble as soon as they grow. */
const TROUBLES = [
  "store_failed_blocks", "load_failed_blocks", "corrupt_blocks", "backup_failed_blocks", "prefetch_failed_blocks",
  "store_refused_blocks", "no_capacity", "workers_lost", "sessions_expired",
]; // prettier-ignore

const history = new History();
const tree = new TreePicture();

const charts = [
  new Chart("Blocks of prompts, by where they were", {
    isStacked: true,
    top: 1,
    format: percent,
    series: ["device", "host", "missed"].map((name) => ({ name, className: name })),
    values: (past) => ["device", "host", "missed"].map((name) => past.over((...two) => hits(...two)?.[name] ?? null)),
  }),
  new Chart("Occupancy", {
    top: 1,
    format: percent,
    series: (report) => places(report).map(({ name, className }) => ({ name, className })),
    values: (past) =>
      places(past.latest.report).map(({ name }) =>
        past.samples.map(({ atS, occupied }) => [atS, occupied.find((each) => each.name === name)?.used ?? null]),
      ),
  }),
  new Chart("Duration of an acquire", {
    format: latency,
    series: [{ name: "median", className: "first" }, { name: "p99", className: "second" }],
    values: (past) => [0.5, 0.99].map((share) => past.over((...two) => quantile(two[0], two[1], "acquire", share))),
  }),
  new Chart("Copies, bytes a second", {
    format: bytes,
    unit: 1024,
    series: [
      { name: "device to host", className: "first" },
      { name: "host to device", className: "device" },
      { name: "to storage", className: "storage" },
      { name: "from storage", className: "host" },
    ],
    values: (past) =>
      [["store", false], ["load", false], ["store", true], ["load", true]].map(([kind, isStorage]) =>
        past.over((earlier, later, seconds) =>
          copied(earlier, later, seconds, (each) => each.kind === kind && (each.executor === "storage") === isStorage),
        ),
      ),
  }),
];

/** What has an occupancy: device pools, the host pool as one, storage. */
function places(report) {
  const devices = pools(report).filter((each) => each.className === "device");
  const shown = devices.slice(0, DEVICES_MAX).map(({ name, className, used }) => ({ name, className, used }));
  if (report.host_pool.slabs) {
    const used = report.hosts.reduce((sum, { states, slots }) => {
      const filled = (states.cached ?? 0) + (states.filling ?? 0) + (states.quarantined ?? 0);
      return sum + (slots ? filled / slots : 0);
    }, 0);
    shown.push({ name: "host pool", className: "host", used });
  }
  const { storage } = report;
  if (storage && storage.capacity_bytes > 0 && storage.size_bytes >= 0) {
    shown.push({ name: "storage", className: "storage", used: storage.size_bytes / storage.capacity_bytes });
  }
  return shown;
}

function show() {
  const { report } = history.latest;
  setText(byId("state"), report.state);
  byId("state").classList.toggle("good", report.state === "serving");
  setText(byId("facts"), `${report.version} · up ${duration(report.uptime_ms / 1000)} · epoch ${report.daemon_epoch}`);
  showHits();
  const acquire = (share) => history.lately(MINUTE_S, (earlier, later) => quantile(earlier, later, "acquire", share));
  setText(byId("acquire-p99"), latency(acquire(0.99)));
  setText(byId("acquire-words"), acquire(0.5) === null ? "none in the last minute" : `median ${latency(acquire(0.5))}, last minute`);
  const perSecond = (name) => history.lately(10, (earlier, later, seconds) => grown(earlier, later, name) / seconds);
  setText(byId("requests-rate"), perSecond("requests") === null ? "–" : `${rate(perSecond("requests"))}/s`);
  setText(byId("requests-words"), `${plural(report.counters.acquires ?? 0, "lease")} granted since the start`);
  setText(byId("sessions"), count(report.sessions));
  const leases = [...report.pools, ...report.hosts].reduce((sum, each) => sum + each.leases, 0);
  const waiting = Object.values(report.waiting).reduce((sum, number) => sum + number, 0);
  setText(byId("leases-words"), `${plural(leases, "lease")}${waiting ? `, ${plural(waiting, "request")} waiting` : ""}`);
  const inHost = report.hosts.reduce((sum, { states }) => sum + (states.cached ?? 0), 0);
  setText(byId("cached"), count(report.cached_blocks + inHost));
  setText(byId("cached-words"), `${count(report.cached_blocks)} on devices, ${count(inHost)} in the host pool`);
  for (const chart of charts) chart.draw(history);
  fillTables(history);
  fillSizes(report);
  showTroubles(report);
}

function showHits() {
  const { report } = history.latest;
  const [lately, ever] = [history.lately(MINUTE_S, hits), hits({ counters: {} }, report)];
  const shown = lately ?? ever;
  setText(byId("hit-rate"), percent(shown?.rate ?? null));
  fillBar(byId("hit-bar"), shown ? ["device", "host", "missed"].map((name) => [name, shown[name]]) : []);
  const inWords = (found) => `${percent(found.device)} device, ${percent(found.host)} host pool`;
  const start = ever ? `${percent(ever.rate)} since the start` : "nothing was asked for yet";
  setText(byId("hit-words"), lately ? `last minute: ${inWords(lately)} · ${start}` : ever ? `since the start: ${inWords(ever)}` : start);
}

function showTroubles(report) {
  const told = [];
  for (const pool of report.pools) {
    const named = { "not healthy": !pool.healthy, degraded: pool.degraded, paused: pool.paused };
    const states = Object.keys(named).filter((name) => named[name]);
    if (pool.state !== "awake") states.unshift(words(pool.state));
    if (states.length) told.push(`replica ${pool.replica}: ${states.join(", ")}${pool.trouble ? `: ${pool.trouble}` : ""}`);
  }
  if (report.offload_paused) told.push("copies of engines in offload mode are paused");
  const { storage } = report;
  if (storage && storage.state !== "ready") told.push(`storage: ${words(storage.state)}${storage.why ? `: ${storage.why}` : ""}`);
  const isTrouble = (name) => TROUBLES.includes(name) || name.startsWith("errors_");
  for (const name of Object.keys(report.counters).filter(isTrouble)) {
    if (history.growth(name) > 0) told.push(`${words(name)}: +${count(history.growth(name))} while this page was open`);
  }
  const list = byId("troubles");
  list.hidden = !told.length;
  while (list.children.length > told.length) list.lastChild.remove();
  told.forEach((text, place) => setText(list.children[place] ?? list.appendChild(element("li")), text));
}

/** Asks for something again and again while the page is visible: the next time so long after an answer. */
class Watch {
  constructor(path, pauseMs, answered, failed) {
    Object.assign(this, { path, pauseMs, answered, failed, timer: 0, isAsking: false });
    document.addEventListener("visibilitychange", () => this.#look());
    this.#look();
  }

  #look() {
    clearTimeout(this.timer);
    if (!document.hidden && !this.isAsking) this.#ask();
  }

  async #ask() {
    this.isAsking = true;
    try {
      const answer = await fetch(this.path, { signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });
      if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
      this.answered(await answer.json());
    } catch (error) {
      this.failed(error);
    } finally {
      this.isAsking = false;
      if (!document.hidden) this.timer = setTimeout(() => this.#ask(), this.pauseMs);
    }
  }
}

function link(text, isOld) {
  setText(byId("link"), text);
  document.body.classList.toggle("old", isOld);
}

let answeredS = 0;
byId("charts").append(...charts.map((chart) => chart.panel));
new Watch(
  "status.json",
  STATUS_MS,
  (report) => {
    answeredS = performance.now() / 1000;
    history.add(report, answeredS, places(report));
    show();
    link("live", false);
  },
  (error) => {
    const old = answeredS ? `the figures are ${duration(performance.now() / 1000 - answeredS)} old` : "nothing to show yet";
    link(`no answer, ${old} (${error.message})`, true);
  },
);
new Watch("tree.json", TREE_MS, (answer) => tree.show(answer), (error) => setText(byId("tree-words"), `No picture: ${error.message}`));
