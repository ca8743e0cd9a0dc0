// Run network.wasm on raw numbers: read inputs from stdin until it ends, write outputs to stdout.
import { readFileSync, writeSync } from "node:fs";

const inputs = [$INPUTS]; // how many numbers, of four bytes each
const outputs = [$OUTPUTS];

const file = readFileSync(new URL("network.wasm", import.meta.url));
const { memory, run } = (await WebAssembly.instantiate(file, {})).instance.exports;
const bytes = [...inputs, ...outputs].map((size) => 4 * size);
const total = bytes.reduce((sum, size) => sum + size, 0);
const start = 65536 * memory.grow(Math.ceil(total / 65536)); // after the memory of the network
const pointers = bytes.map((_, i) => bytes.slice(0, i).reduce((sum, size) => sum + size, start));
const inputBytes = bytes.slice(0, inputs.length).reduce((sum, size) => sum + size, 0);
const buffer = new Uint8Array(memory.buffer, start, total);

const given = readFileSync(0);
if (given.length % inputBytes) {
  console.error("stdin ends within an input: expected multiples of " + inputBytes + " bytes");
  process.exit(1);
}
for (let at = 0; at < given.length; at += inputBytes) {
  buffer.set(given.subarray(at, at + inputBytes));
  run(...pointers);
  for (let sent = inputBytes; sent < total; ) sent += writeSync(1, buffer.subarray(sent));
}
