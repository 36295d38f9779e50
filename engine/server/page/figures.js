// The live figures of the server, from /v1/load.

function size(bytes) {
  return bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(2)} GB`;
}

function showMemory(load) {
  const rest = Math.max(0, load.resident_bytes - load.weights_bytes - load.kv_cache_bytes);
  const parts = [["weights", load.weights_bytes, "--weights"], ["KV cache", load.kv_cache_bytes, "--cache"], ["rest", rest, "--rest"]];
  const all = Math.max(1, parts.reduce((sum, [, bytes]) => sum + bytes, 0));
  at("split").replaceChildren(...parts.map(([, bytes, color]) => element("div", "", { background: `var(${color})`, width: `${100 * bytes / all}%` })));
  at("split").setAttribute("aria-label", parts.map(([name, bytes]) => `${name} ${size(bytes)}`).join(", "));
  const lines = parts.flatMap(([name, bytes, color]) => [element("dt", name, { "--color": `var(${color})` }), element("dd", size(bytes))]);
  const used = [element("dt", "KV cache in use"), element("dd", `${(100 * load.kv_cache_used_share).toFixed(1)} %`)];
  at("memory").replaceChildren(...lines, ...used);
}

function showSkips(load) {
  const skipped = load.experts_skipped_per_layer, evaluated = load.experts_evaluated_per_layer;
  at("skips").hidden = skipped.length === 0;
  if (skipped.length === 0) return;
  const shares = skipped.map((count, layer) => count / Math.max(1, count + evaluated[layer]));
  const top = Math.max(0.01, ...shares);
  at("layers").replaceChildren(...shares.map((share, layer) => {
    const bar = element("div", "", { height: `${100 * share / top}%` });
    bar.title = `layer ${layer}: ${(100 * share).toFixed(1)} %`;
    return bar;
  }));
  at("layers").setAttribute("aria-label", shares.map((share, layer) => `layer ${layer} ${(100 * share).toFixed(1)} %`).join(", "));
  at("axis").replaceChildren(element("span", "layer 0"), element("span", shares.length > 1 ? `layer ${shares.length - 1}` : ""));
  const sum = (counts) => counts.reduce((total, count) => total + count, 0);
  const share = 100 * sum(skipped) / Math.max(1, sum(skipped) + sum(evaluated));
  const none = "None so far. Skipping is asked for with --skip-threshold.";
  at("skipped").textContent = sum(skipped) ? `${share.toFixed(1)} % of all; the highest bar is ${(100 * top).toFixed(1)} %` : none;
}

function showLoad(load) {
  at("rate").textContent = load.tokens_per_second.toFixed(1);
  const counts = { running: load.running, waiting: load.waiting, read: load.prompt_tokens, cached: load.cached_tokens, written: load.generated_tokens };
  Object.entries(counts).forEach(([id, count]) => { at(id).textContent = count.toLocaleString("en"); });
  showMemory(load);
  showSkips(load);
}

function showTimings(timings, waited) {
  const rate = timings.predicted_per_second === null ? "" : ` at ${timings.predicted_per_second.toFixed(1)} tokens/s`;
  at("answer").textContent = `last answer: ${timings.predicted_n} tokens${rate}, the first after ${(waited / 1000).toFixed(2)} s`;
}
