// The tables: memory, sessions and leases, workers, copies, storage, requests.

import { byId, fillTable } from "./dom.js";
import { bytes, count, duration, latency, namespaceName, percent, rate, words } from "./format.js";
import { quantile } from "./history.js";

/** Rates and percentiles in tables are of this time. */
const WINDOW_S = 60;

export function fillTables(history) {
  const { report } = history.latest;
  fillTiers(report);
  fillSessions(report);
  fillWorkers(report);
  fillCopies(report);
  fillStorage(report);
  fillRequests(history);
}

/** The parts of a pool in which slots are, for a bar. */
function shares(states, slots) {
  const of = (...names) => names.reduce((sum, name) => sum + (states[name] ?? 0), 0) / (slots || 1);
  return [
    ["leased", of("leased", "fenced")],
    ["cached", of("cached")],
    ["filling", of("filling")],
    ["wrong", of("quarantined")],
  ];
}

/** Every pool with its size and what of it is used: `{name, className, used, ...}`. */
export function pools(report) {
  const poolBytes = report.host_pool.slabs * report.host_pool.slab_bytes;
  const devices = report.pools.map((pool) => {
    const replica = report.replicas.find((each) => each.name === pool.replica);
    const name = `device of ${pool.replica}`;
    return tierOf(name, "device", pool.states, pool.slots, pool.pinned, pool.slots * (replica?.block_bytes ?? 0));
  });
  const hosts = report.hosts.map((host) => {
    const slots = host.slots - (host.states.absent ?? 0);
    const size = host.slots ? (poolBytes * slots) / host.slots : 0;
    return tierOf(`host pool of ${namespaceName(host)}`, "host", host.states, slots, host.pinned, size);
  });
  return [...devices, ...hosts];
}

function tierOf(name, className, states, slots, pinned, sizeBytes) {
  const free = states.free ?? 0;
  return { name, className, states, slots, free, pinned, sizeBytes, used: slots ? (slots - free) / slots : 0 };
}

function fillTiers(report) {
  const rows = pools(report).map((pool) => [
    pool.name,
    shares(pool.states, pool.slots),
    percent(pool.used),
    count(pool.slots),
    count(pool.free),
    count(pool.states.cached ?? 0),
    count(["leased", "fenced", "filling", "quarantined"].reduce((sum, state) => sum + (pool.states[state] ?? 0), 0)),
    count(pool.pinned),
    bytes(pool.sizeBytes),
  ]);
  for (const kept of report.engine_pools) {
    const used = kept.blocks ? kept.named / kept.blocks : 0;
    const cells = [percent(used), count(kept.blocks), count(kept.blocks - kept.named), count(kept.named), "–", "–"];
    rows.push([`device memory of ${kept.name}`, [["cached", used]], ...cells, bytes(kept.size_bytes)]);
  }
  const columns = ["slots", "free", "cached", "in use", "pinned", "size"].map((title) => [title, true]);
  fillTable(byId("tiers"), [["pool"], [""], ["used", true], ...columns], rows, "no pools");
}

function fillSessions(report) {
  const rows = report.session_list.map((each) => [
    `${each.is_offload ? "namespace" : "replica"} ${each.where}`,
    String(each.id),
    count(each.leases),
    each.is_offload ? count(each.copies) : "–",
    count(each.set_aside),
    duration(each.silent_s),
    each.state,
  ]);
  const left = report.sessions - rows.length;
  if (rows.length && left > 0) rows.push([`${count(left)} more`, "", "", "", "", "", ""]);
  const figures = ["leases", "copies under way", "slots set aside", "silent for"].map((title) => [title, true]);
  fillTable(byId("sessions-table"), [["where"], ["session", true], ...figures, ["state"]], rows, "nobody has a session");
}

function fillWorkers(report) {
  const rows = report.pools.map((pool) => {
    const replica = report.replicas.find((each) => each.name === pool.replica);
    const state = pool.degraded ? "degraded" : pool.healthy ? "healthy" : "not healthy";
    const { model = "", device = "", shards = 0 } = replica ?? {};
    return [pool.replica, model, device, count(shards), pool.trouble ? `${state}: ${pool.trouble}` : state, count(pool.restarts)];
  });
  const columns = [["replica"], ["model"], ["device"], ["shards", true], ["workers"], ["restarts", true]];
  fillTable(byId("workers"), columns, rows, "no replicas: engines in offload mode copy for themselves");
}

const WAYS = {
  worker: { store: "device to host pool, by workers", load: "host pool to device, by workers" },
  engine: { store: "device to host pool, by engines", load: "host pool to device, by engines" },
  storage: { store: "host pool to storage", load: "storage to host pool" },
};

function fillCopies(report) {
  const rows = report.copies
    .filter((each) => each.ended || each.in_flight)
    .map((each) => [
      WAYS[each.executor][each.kind],
      count(each.in_flight),
      count(each.ended),
      bytes(each.copied_bytes),
      latency(each.ended ? each.seconds / each.ended : null),
    ]);
  const columns = [["from, to"], ["under way", true], ["ended", true], ["copied", true], ["on average", true]];
  fillTable(byId("copies"), columns, rows, "nothing has been copied yet");
}

function fillStorage({ storage }) {
  const known = (number, format) => (number < 0 ? "unknown" : format(number));
  const disk = storage?.local_disk;
  const rows = storage
    ? [
        ["backend", storage.backend],
        ["state", words(storage.state) + (storage.why ? `: ${storage.why}` : "")],
        ["blocks", known(storage.blocks, count)],
        ["used", `${known(storage.size_bytes, bytes)} of ${known(storage.capacity_bytes, bytes)}`],
        ...(disk
          ? [
              ["local disk", `${known(disk.size_bytes, bytes)} of ${known(disk.capacity_bytes, bytes)}`],
              ["blocks on it", known(disk.blocks, count)],
              ["blocks read from it", count(disk.read_blocks)],
            ]
          : []),
        ["written", words(storage.backup)],
        ["restarts", count(storage.restarts)],
        ...Object.entries(storage.counters).map(([name, number]) => [words(name), count(number)]),
      ]
    : [];
  fillTable(byId("storage"), [[""], ["", true]], rows, "no storage is configured");
}

function fillRequests(history) {
  const { report } = history.latest;
  const rows = report.requests
    .map(({ verb, counts, seconds }) => ({ verb, seconds, all: counts.reduce((sum, each) => sum + each, 0) }))
    .sort((one, other) => other.all - one.all)
    .map(({ verb, seconds, all }) => {
      const of = (share) => history.lately(WINDOW_S, (earlier, later) => quantile(earlier, later, verb, share));
      return [verb, count(all), perSecond(history, verb), latency(seconds / all), latency(of(0.5)), latency(of(0.99))];
    });
  const columns = ["since the start", "a second", "on average", "median", "p99"].map((title) => [title, true]);
  fillTable(byId("requests"), [["request"], ...columns], rows, "none");
}

function perSecond(history, verb) {
  const of = (report) => (report.requests.find((each) => each.verb === verb)?.counts ?? []).reduce((sum, each) => sum + each, 0);
  const found = history.lately(WINDOW_S, (earlier, later, seconds) => (of(later) - of(earlier)) / seconds);
  return found === null ? "–" : rate(found);
}
