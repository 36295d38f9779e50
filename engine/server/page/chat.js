// The conversation: what is shown, what is sent, and what comes back.

const turns = [];
let info = null, running = null, key = sessionStorage.getItem("key") || "";

async function ask(path, body, signal) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body) headers["content-type"] = "application/json";
  const response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  if (response.ok) return response;
  const said = (await response.json().catch(() => ({}))).error || {};
  at("key-form").hidden = response.status !== 401;
  throw new Error(said.message || `the server answered ${response.status}`);
}

async function look() {
  try {
    const load = await currentLoad();
    if (chosen === null || load.id === chosen) { // else another one was chosen meanwhile
      if (!info) begin(load);
      if (load.loaded !== false) showLoad(load);
    }
  } catch (error) {
    at("about").textContent = error.message;
    info = null;
    label();
  }
  setTimeout(look, running ? 500 : 1500);
}

function begin(load) {
  info = load;
  at("key-form").hidden = true;
  at("model").textContent = document.title = load.id;
  const kind = load.chat_template ? "" : "; a base model: it continues text";
  at("about").textContent = `up to ${load.max_model_len.toLocaleString("en")} tokens${kind}`;
  at("tokens").value = Math.min(at("tokens").value, Math.ceil(load.max_model_len / 4));
  at("log").className = load.chat_template ? "chat" : "text";
  at("log").setAttribute("aria-label", load.chat_template ? "Conversation" : "Text");
  at("box").placeholder = load.chat_template ? "Say something" : "Text to continue, or nothing to go on";
  at("more").hidden = !load.chat_template;
  for (const id of ["skip", "skip-label", "skip-value"]) at(id).hidden = !load.skip_threshold;
  at("skip").step = (load.skip_threshold || 1) / 100;
  at("skip").max = load.skip_threshold || 0;
  at("skip").value = load.skip_threshold || 0;
  showSkipValue();
  label();
}

function showSkipValue() {
  at("skip-value").textContent = Number(at("skip").value).toFixed(2);
}

function label() {
  at("go").disabled = !info && !running;
  at("go").textContent = running ? "Stop" : info && !info.chat_template ? "Continue" : "Send";
}

function action(text, act) {
  const made = element("button", text);
  made.type = "button";
  made.addEventListener("click", () => act(made));
  return made;
}

function following(change) {
  const log = at("log"), follows = log.scrollTop + log.clientHeight > log.scrollHeight - 40;
  change();
  if (follows) log.scrollTop = log.scrollHeight;
}

// Add a turn to the conversation and to the page. A turn has a role and a text, an answer also its reasoning and its calls, and
// a tool's turn the call that it answers.
function add(turn) {
  const message = element("div"), shown = element("div");
  message.className = `message ${turn.role}`;
  shown.className = `turn ${turn.role}`;
  const made = { reasoning: "", calls: [], ...turn, message, shown };
  const actions = element("div");
  actions.className = "actions";
  if (turn.role === "user") actions.append(action("Edit", () => edit(made)));
  if (turn.role === "assistant") {
    actions.append(action("Repeat", () => repeat(made)), action("Copy", (button) => copyText(button, made.text)));
  }
  message.append(shown, actions);
  turns.push(made);
  following(() => {
    at("log").append(message);
    show(made);
  });
  return made;
}

// Show the text of a turn: an answer as Markdown, everything else as it is.
function show(turn) {
  if (turn.role === "assistant" && at("log").className === "chat") renderMarkdown(turn.shown, turn.text);
  else turn.shown.textContent = turn.role === "tool" ? `${turn.call.name}: ${turn.text}` : turn.text;
  turn.message.querySelectorAll(".reasoning, .call").forEach((each) => each.remove());
  if (turn.reasoning) {
    const details = element("details", "");
    details.className = "reasoning";
    details.open = !turn.text;
    details.append(element("summary", "Reasoning"), turn.reasoning);
    turn.shown.before(details);
  }
  for (const call of turn.calls) turn.shown.before(shownCall(call));
}

// Show a turn before the next picture of the screen, however many pieces come until then.
function showSoon(turn) {
  if (turn.waits) return;
  turn.waits = true;
  requestAnimationFrame(() => {
    turn.waits = false;
    following(() => show(turn));
  });
}

function shownCall(call) {
  const made = element("div"), name = element("b", call.name), form = element("div");
  made.className = "call";
  let given = call.arguments;
  try {
    given = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch { /* they are not complete yet */ }
  made.append("Call of ", name, element("pre", given));
  if (!running && !turns.some((turn) => turn.role === "tool" && turn.call.id === call.id)) {
    const result = element("textarea");
    result.className = "boxed";
    result.setAttribute("aria-label", `Result of ${call.name}`);
    result.placeholder = "The tool's result";
    form.append(result, action("Give the result", () => giveResult(call, result.value)));
    made.append(form);
  }
  return made;
}

// Answer a call. The model goes on once all calls of its answer have results.
function giveResult(call, text) {
  if (running) return;
  add({ role: "tool", text, call });
  const asking = turns.findLast((turn) => turn.role === "assistant");
  show(asking);
  const given = new Set(turns.filter((turn) => turn.role === "tool").map((turn) => turn.call.id));
  if (asking.calls.every((each) => given.has(each.id))) answer();
}

// Remove a turn and all after it.
function cut(turn) {
  for (const gone of turns.splice(turns.indexOf(turn))) gone.message.remove();
}

function repeat(turn) {
  if (running || !info) return;
  cut(turn);
  answer();
}

function edit(turn) {
  if (running) return;
  const box = element("textarea");
  box.className = "boxed";
  box.value = turn.text;
  box.setAttribute("aria-label", "Message");
  const back = () => { box.replaceWith(turn.shown); row.remove(); };
  const row = element("div");
  row.className = "actions";
  row.append(action("Send", () => { back(); cut(turn); add({ role: "user", text: box.value }); answer(); }), action("Cancel", back));
  turn.shown.replaceWith(box);
  box.after(row);
  box.focus();
}

function showTurns(kept) {
  if (running) running.abort();
  turns.length = 0;
  at("log").replaceChildren();
  current = null;
  for (const turn of kept) add(turn);
  for (const turn of turns) show(turn);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

function message(turn) {
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.call.id, content: turn.text };
  if (!turn.calls.length) return { role: turn.role, content: turn.text };
  const calls = turn.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  return { role: turn.role, content: turn.text || null, tool_calls: calls };
}

// The body of the next request. Throws for tools that are not JSON.
function request() {
  const wanted = { model: info.id, stream: true, temperature: Number(at("temperature").value), max_tokens: Number(at("tokens").value) };
  if (info.skip_threshold) wanted.skip_threshold = Number(at("skip").value);
  const spoken = turns.filter((turn) => turn.role !== "failed" && (turn.text || turn.calls.length || turn.role === "tool"));
  if (!info.chat_template) return { ...wanted, prompt: spoken.map(({ text }) => text).join("") };
  const system = at("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...spoken.map(message)];
  const tools = at("tools").value.trim();
  if (!tools) return { ...wanted, messages };
  let listed;
  try {
    listed = JSON.parse(tools);
  } catch (error) {
    throw new Error(`the tools are no JSON: ${error.message}`);
  }
  const each = (tool) => (tool.function ? tool : { type: "function", function: tool });
  return { ...wanted, messages, tools: (Array.isArray(listed) ? listed : [listed]).map(each) };
}

function take(turn, delta) {
  turn.text += delta.content || "";
  turn.reasoning += delta.reasoning_content || "";
  for (const piece of delta.tool_calls || []) {
    const call = turn.calls[piece.index] || (turn.calls[piece.index] = { id: "", name: "", arguments: "" });
    call.id = piece.id || call.id;
    call.name = (piece.function && piece.function.name) || call.name;
    call.arguments += (piece.function && piece.function.arguments) || "";
  }
}

async function answer() {
  if (!info) return add({ role: "failed", text: "the model is not ready yet; send the message again" });
  const chat = info.chat_template, started = performance.now();
  let first = 0, pieces = 0, turn = null;
  const own = running = new AbortController();
  label();
  try {
    const body = request();
    const last = turns[turns.length - 1];
    turn = !chat && last && last.role === "assistant" ? last : add({ role: "assistant", text: "" });
    const response = await ask(chat ? "/v1/chat/completions" : "/v1/completions", body, own.signal);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      const delta = choice && (chat ? choice.delta : { content: choice.text });
      if (delta && (delta.content || delta.reasoning_content || delta.tool_calls)) {
        pieces += 1;
        first = first || performance.now();
        take(turn, delta);
        showSoon(turn);
        const seconds = (performance.now() - first) / 1000;
        if (seconds > 0.2) at("answer").textContent = `this answer: ${(pieces / seconds).toFixed(1)} tokens/s so far`;
      }
      if (chunk.timings) showTimings(chunk.timings, (first || performance.now()) - started);
    }
  } catch (error) {
    if (error.name !== "AbortError") add({ role: "failed", text: error.message });
  }
  if (running !== own) return; // another conversation was opened meanwhile
  running = null;
  if (turn && turns.includes(turn)) {
    show(turn);
    keepConversation();
  }
  label();
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("box").value;
  if (running) return running.abort();
  if (!info || (!text && (info.chat_template || turns.length === 0))) return;
  if (text) add({ role: "user", text });
  at("box").value = "";
  answer();
});
at("box").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && info && (info.chat_template || event.ctrlKey)) {
    event.preventDefault();
    if (!running) at("form").requestSubmit();
  }
});
at("clear").addEventListener("click", () => (current ? deleteConversation(current) : showTurns([])));
at("new").addEventListener("click", () => { keepRunning(); showTurns([]); listConversations(); });
at("skip").addEventListener("input", showSkipValue);
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value;
  sessionStorage.setItem("key", key);
});
if (matchMedia("(max-width: 760px)").matches) at("kept").open = false;
loadConversations();
listConversations();
look();
