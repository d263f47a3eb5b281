/** Encrypts and decrypts payloads as rsmq does: AES-256-GCM with a key of its own for each message. */
import { createCipheriv, createDecipheriv, createHash, createHmac } from 'node:crypto';
import zlib from 'node:zlib';

const ABSENT = Buffer.from('ffffffff', 'hex');

/** Each part after its length, as 4 bytes, the highest first; `undefined` for a part that is not there. */
const parts = (...values) => Buffer.concat(values.flatMap((value) => {
  if (value === undefined || value === null) return [ABSENT];
  const bytes = Buffer.from(value);
  const length = Buffer.alloc(4);
  length.writeUInt32BE(bytes.length);
  return [length, bytes];
}));
const hmac = (secret, data) => createHmac('sha256', secret).update(data).digest();
const about = ({ id, key, type, enc }) => parts(id, key, type ?? 'application/json', enc);

/** The payload of an entry with the fields `data` (a Buffer), `id`, `key`, `type` and `enc`. Throws if it was changed. */
export function decrypt({ data, ...fields }, secret) {
  const decipher = createDecipheriv('aes-256-gcm', hmac(secret, parts('enc', fields.id)), data.subarray(0, 12));
  decipher.setAAD(about(fields));
  decipher.setAuthTag(data.subarray(-16));
  return Buffer.concat([decipher.update(data.subarray(12, -16)), decipher.final()]);
}

/** What to store as `data`: nonce, ciphertext, tag. The same message has the same bytes. */
export function encrypt(payload, fields, secret) {
  const nonce = hmac(secret, Buffer.concat([parts('iv'), about(fields), parts(payload)])).subarray(0, 12);
  const cipher = createCipheriv('aes-256-gcm', hmac(secret, parts('enc', fields.id)), nonce);
  cipher.setAAD(about(fields));
  return Buffer.concat([nonce, cipher.update(payload), cipher.final(), cipher.getAuthTag()]);
}

/** The body of a message whose `enc` ends with `ref`, if it is the one that was published. Throws otherwise. */
export function checkedBody({ id, data }, body) {
  if (!createHash('sha256').update(parts(id)).update(body).digest().equals(data)) throw new Error('it is another body');
  return body;
}

/**
 * The payload of any encoded entry. `get(name)` returns a body from the store; `unzstd` decompresses one frame, for
 * which Node.js has a function from 22.15 on.
 */
export function decode({ data, enc, ref, ...fields }, secret, { get, unzstd = zlib.zstdDecompressSync } = {}) {
  const words = enc.split(';');
  if (words.at(-1) === 'ref') {
    words.pop();
    data = checkedBody({ ...fields, data }, get(ref));
  }
  const inner = words.join(';');
  for (const word of words.reverse()) {
    if (word.startsWith('a256gcm=')) data = decrypt({ ...fields, data, enc: inner }, secret);
    else if (word === 'zstd') data = unzstd(data);
    else throw new Error(`this program cannot undo ${word}`);
  }
  return data;
}

/** A letter with an encrypted payload (content type 253, or flag 32 of one for an MQTT client): its topic and payload. */
export function openLetter(letter, secret) {
  let at = 13; // version, published, expires
  const take = (sizeBytes) => {
    const size = letter.readUIntBE(at, sizeBytes);
    at += sizeBytes;
    if (sizeBytes === 2 && size === 0xffff) return undefined;
    at += size;
    return letter.subarray(at - size, at);
  };
  let topic = take(1);
  const type = letter[at++];
  const flags = type === 254 ? letter[at++] : 0;
  if (type !== 253 && !(flags & 32)) throw new Error('the payload of this letter is not encoded');
  const [enc, contentType, id, key] = [take(2), take(2), take(2), take(2)].map((each) => each?.toString());
  if (type === 254) topic = take(2);
  take(2); // headers, or for an MQTT client properties
  if (flags & 16) take(2); // the filter of a shared subscription
  const payload = decrypt({ data: letter.subarray(at), id, key, type: contentType, enc }, secret);
  return { topic: topic.toString(), payload };
}
