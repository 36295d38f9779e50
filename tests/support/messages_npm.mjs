// A tool loop by Anthropic's package of npm: node messages_npm.mjs URL, in a directory that has @anthropic-ai/sdk.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const resolve = createRequire(`${process.cwd()}/`).resolve;
const load = (name) =>
  import(pathToFileURL(resolve(name)).href).then((found) => (found.default?.default ? found.default : found));
const { default: Anthropic } = await load("@anthropic-ai/sdk");
const { betaTool } = await load("@anthropic-ai/sdk/helpers/beta/json-schema");
const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ name: "weather", input_schema: schema }];
const degrees = { Rome: "21", Köln: "9" };
const question = { role: "user", content: "How warm?" };
const answer = "Rome has 21 degrees, Köln 9.";

for (const ask of [
  (messages) => client.messages.create({ model: "scripted", max_tokens: 50, messages, tools }),
  (messages) => client.messages.stream({ model: "scripted", max_tokens: 50, messages, tools }).finalMessage(),
]) {
  const messages = [question];
  const first = await ask(messages);
  assert.deepEqual(first.content.map((block) => block.type), ["thinking", "text", "tool_use", "tool_use"]);
  assert.equal(first.stop_reason, "tool_use");
  const calls = first.content.filter((block) => block.type === "tool_use");
  const content = calls.map(({ id, input }) => ({ type: "tool_result", tool_use_id: id, content: degrees[input.city] }));
  messages.push({ role: "assistant", content: first.content }, { role: "user", content });
  const last = await ask(messages);
  assert.equal(last.content[0].text, answer);
  assert.equal(last.stop_reason, "end_turn");
  assert.equal(last.usage.output_tokens, 9);
}

for (const stream of [false, true]) {
  const weather = betaTool({ name: "weather", description: "", inputSchema: schema, run: ({ city }) => degrees[city] });
  const runner = client.beta.messages.toolRunner({
    model: "scripted",
    max_tokens: 50,
    messages: [question],
    tools: [weather],
    stream,
  });
  const last = await runner.runUntilDone();
  assert.equal(last.content[0].text, answer);
}

await assert.rejects(
  client.messages.create({ model: "scripted", max_tokens: 50, messages: [question], container: "c" }),
  (error) => error.status === 400 && error.type === "invalid_request_error",
);
console.log("ok");
