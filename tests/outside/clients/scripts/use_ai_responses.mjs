// The `ai` package with `@ai-sdk/open-responses`: plain, streamed, tool loops of three turns, structured output.

import assert from "node:assert";
import { createOpenResponses } from "@ai-sdk/open-responses";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenResponses({
  name: "loraplex",
  url: `${process.env.CLIENT_BASE_URL}/responses`,
  apiKey: process.env.CLIENT_API_KEY,
});
const model = provider(process.env.CLIENT_MODEL);
const prompt = "How is the weather in Rome?";
const city = z.enum(["Rome", "Oslo"]);
const schema = z.object({ city, warm: z.boolean() });
const usages = [];

const plain = await generateText({ model, system: "Answer briefly.", prompt, maxOutputTokens: 8 });
usages.push(plain.usage);
assert(plain.text);

const streamed = streamText({ model, prompt, maxOutputTokens: 8, temperature: 0.2 });
let text = "";
for await (const part of streamed.textStream) text += part;
usages.push(await streamed.usage);
assert(text);

const calls = [];
const getWeather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city }),
  execute: async (input) => {
    calls.push(input.city);
    return { celsius: 21 };
  },
});
const choices = [{ type: "tool", toolName: "getWeather" }, "required", "none"];
const loop = {
  model,
  prompt,
  tools: { getWeather },
  stopWhen: stepCountIs(3),
  maxOutputTokens: 64,
  prepareStep: ({ stepNumber }) => ({ toolChoice: choices[stepNumber] }),
};
const told = await generateText(loop);
for (const step of told.steps) usages.push(step.usage);
// It cannot forbid several calls in one turn.
assert.equal(told.steps.length, 3);
assert(calls.length >= 2);
assert(told.text);

const toldInStream = streamText(loop);
await toldInStream.consumeStream();
const steps = await toldInStream.steps;
for (const step of steps) usages.push(step.usage);
assert.equal(steps.length, 3);

const object = await generateObject({ model, schema, prompt, maxOutputTokens: 64 });
usages.push(object.usage);
schema.parse(object.object);

const objectInStream = streamObject({ model, schema, prompt, maxOutputTokens: 64 });
for await (const _ of objectInStream.partialObjectStream);
usages.push(await objectInStream.usage);
schema.parse(await objectInStream.object);

const sum = (name) => usages.reduce((total, usage) => total + usage[name], 0);
console.log(
  JSON.stringify({
    requests: usages.length,
    prompt_tokens: sum("inputTokens"),
    completion_tokens: sum("outputTokens"),
  }),
);
