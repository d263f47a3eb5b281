// The golden vectors of encoded payloads in docs/wire-format.md.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import test from 'node:test';

import { decrypt, encrypt, openLetter } from './sealed.js';

const page = readFileSync(new URL('../../docs/wire-format.md', import.meta.url), 'utf8');
const vectors = JSON.parse(page.split('\n## Encoded payloads\n')[1].split('```json\n')[1].split('```')[0]);
const secret = Buffer.from(Array.from({ length: 32 }, (_, n) => n));
const fieldsOf = ({ id, key, type, enc }) => ({ id, key, type, enc });

test('every golden vector is encrypted and decrypted', () => {
  assert.ok(vectors.length >= 4, `found ${vectors.length} vectors`);
  for (const vector of vectors) {
    const stored = Buffer.from(vector.data, 'hex');
    const inner = decrypt({ ...fieldsOf(vector), data: stored }, secret);
    if (!vector.enc.startsWith('zstd')) assert.equal(inner.toString('hex'), vector.payload); // else it is compressed
    assert.equal(encrypt(inner, fieldsOf(vector), secret).toString('hex'), vector.data);
  }
});

test('a ciphertext of another message does not decrypt', () => {
  for (const vector of vectors) {
    const stored = { ...fieldsOf(vector), data: Buffer.from(vector.data, 'hex') };
    for (const change of [{ id: 'another' }, { key: 'another' }, { type: 'another' }, { enc: 'another' }]) {
      assert.throws(() => decrypt({ ...stored, ...change }, secret));
    }
  }
});

test('every golden vector of a letter is opened', () => {
  const letters = JSON.parse(page.split('\n## Letters\n')[1].split('```json\n')[1].split('```')[0]);
  assert.ok(letters.length >= 3, `found ${letters.length} vectors`);
  for (const { letter, topic, payload } of letters) {
    const opened = openLetter(Buffer.from(letter, 'hex'), secret);
    assert.deepEqual([opened.topic, opened.payload.toString('hex')], [topic, payload]);
    const changed = Buffer.from(letter, 'hex');
    changed[changed.length - 1] ^= 1;
    assert.throws(() => openLetter(changed, secret));
  }
});
