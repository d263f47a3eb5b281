// The golden vectors of docs/wire-format.md: a client that computes another partition breaks the order of that key.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import test from 'node:test';

import { murmur3 } from './murmur3.js';

const page = readFileSync(new URL('../../docs/wire-format.md', import.meta.url), 'utf8');
const rows = page.matchAll(/^\| `(".*")`(?: times (\d+))? \| `0x([0-9a-f]{8})` \| (\d+) \| (\d+) \| (\d+) \|$/gm);
const vectors = [...rows].map(([, key, times, hash, ...expected]) => ({
  key: JSON.parse(key).repeat(Number(times ?? 1)),
  hash: parseInt(hash, 16),
  partitions: expected.map(Number),
}));

test('every golden vector has its hash and its partition of 8, 12 and 1024', () => {
  assert.ok(vectors.length >= 18, `found ${vectors.length} vectors`);
  for (const { key, hash, partitions } of vectors) {
    const computed = murmur3(Buffer.from(key));
    assert.equal(computed, hash, key);
    assert.deepEqual([8, 12, 1024].map((count) => computed % count), partitions, key);
  }
});
