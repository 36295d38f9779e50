// The choice of a model, where the server has several.

let chosen = null;

// Show the models, and choose one that is loaded, or else the first one.
async function listModels() {
  const { data } = await (await ask("/v1/models")).json();
  const select = at("models");
  const several = data.length > 0 && data[0].loaded !== undefined;
  select.hidden = !several;
  at("model").hidden = several;
  if (!several) chosen = null;
  if (!several) return;
  const names = data.map((model) => model.id);
  if (!names.includes(chosen)) chosen = (data.find((model) => model.loaded) || data[0]).id;
  if (select.options.length !== names.length || names.some((name, place) => select.options[place].value !== name)) {
    select.replaceChildren(...names.map((name) => new Option(name, name)));
  }
  select.value = chosen;
}

// The current figures of the chosen model. It is loaded first if it was just chosen: any request that names it does so.
async function currentLoad() {
  if (!info) await listModels();
  if (chosen === null) return (await ask("/v1/load")).json();
  const path = `/v1/load?model=${encodeURIComponent(chosen)}`, load = await (await ask(path)).json();
  if (load.loaded || info) return load;
  at("about").textContent = `${chosen} is being loaded`;
  await ask("/tokenize", { model: chosen, prompt: "" });
  return (await ask(path)).json();
}

at("models").addEventListener("change", () => {
  chosen = at("models").value;
  info = null;
  label();
  at("about").textContent = `${chosen} is the model of the next message`;
});
