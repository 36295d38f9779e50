// A tool loop through Responses by the openai package of npm: node responses_npm.mjs URL, in a directory that has the package.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const { default: OpenAI } = await import(pathToFileURL(createRequire(`${process.cwd()}/`).resolve("openai")).href).then(
  (found) => (found.default?.default ? found.default : found),
);
const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", name: "weather", parameters, strict: true }];
const degrees = { Rome: "21", Köln: "9" };

for (const ask of [
  (input) => client.responses.create({ model: "scripted", input, tools }),
  (input) => client.responses.stream({ model: "scripted", input, tools }).finalResponse(),
]) {
  const input = [{ role: "user", content: "How warm?" }];
  const first = await ask(input);
  assert.deepEqual(first.output.map((item) => item.type), ["reasoning", "message", "function_call", "function_call"]);
  input.push(...first.output);
  for (const call of first.output.filter((item) => item.type === "function_call")) {
    const output = degrees[JSON.parse(call.arguments).city];
    input.push({ type: "function_call_output", call_id: call.call_id, output });
  }
  const last = await ask(input);
  assert.equal(last.output_text, "Rome has 21 degrees, Köln 9.");
  assert.equal(last.status, "completed");
  assert.equal(last.usage.output_tokens, 9);
}

const types = [];
for await (const event of await client.responses.create({ model: "scripted", input: "hi", stream: true })) types.push(event.type);
assert.equal(types[0], "response.created");
assert.equal(types.at(-1), "response.completed");
await assert.rejects(
  client.responses.create({ model: "scripted", input: "hi", previous_response_id: "resp_1" }),
  (error) => error.status === 400 && error.param === "previous_response_id",
);
console.log("ok");
