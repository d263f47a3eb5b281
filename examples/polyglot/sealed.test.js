// The golden vectors of encoded payloads in docs/wire-format.md.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import test from 'node:test';
import zlib from 'node:zlib';

import { checkedBody, decode, decrypt, encrypt, openLetter } from './sealed.js';

const page = readFileSync(new URL('../../docs/wire-format.md', import.meta.url), 'utf8');
const vectors = JSON.parse(page.split('\n## Encoded payloads\n')[1].split('```json\n')[1].split('```')[0]);
const others = JSON.parse(page.split('\n## Encoded payloads\n')[1].split('```json\n')[2].split('```')[0]);
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

/** The fields of an entry, and its store. */
const stored = (vector) => [
  { ...fieldsOf(vector), data: Buffer.from(vector.data, 'hex'), ref: vector.ref },
  { get: (name) => (name === vector.ref ? Buffer.from(vector.body, 'hex') : assert.fail(`there is no ${name}`)) },
];

test('a body in a store is read, and another one is refused', () => {
  const outside = others.filter(({ enc }) => enc.endsWith('ref'));
  assert.equal(outside.length, 2);
  for (const vector of outside) {
    const [fields, store] = stored(vector);
    const body = checkedBody(fields, store.get(vector.ref));
    if (!vector.enc.startsWith('zstd')) assert.equal(decode(fields, secret, store).toString('hex'), vector.payload);
    else decrypt({ ...fields, data: body, enc: 'zstd;a256gcm=k7' }, secret); // a frame, which the next test reads
    const changed = Buffer.from(body);
    changed[0] ^= 1;
    assert.throws(() => decode(fields, secret, { get: () => changed }), /another body/);
  }
});

const old = zlib.zstdDecompressSync ? false : `Node.js ${process.versions.node} has no zstd: 22.15 has`;
test('what was compressed is read', { skip: old }, () => {
  for (const vector of [...vectors, ...others].filter(({ enc }) => enc.startsWith('zstd'))) {
    const [fields, store] = stored(vector);
    assert.equal(decode(fields, secret, store).toString('hex'), vector.payload);
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
