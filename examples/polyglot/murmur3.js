/** murmur3_x86_32 of a Buffer, unsigned: what decides the partition of a key. */
export function murmur3(bytes, seed = 0) {
  const rotate = (x, bits) => (x << bits) | (x >>> (32 - bits));
  const mix = (block) => Math.imul(rotate(Math.imul(block, 0xcc9e2d51), 15), 0x1b873593);
  const whole = bytes.length & ~3;
  let hash = seed;
  for (let i = 0; i < whole; i += 4) {
    hash = Math.imul(rotate(hash ^ mix(bytes.readInt32LE(i)), 13), 5) + 0xe6546b64;
  }
  let rest = 0;
  for (let i = bytes.length - 1; i >= whole; i--) rest = (rest << 8) | bytes[i];
  hash ^= mix(rest) ^ bytes.length;
  hash = Math.imul(hash ^ (hash >>> 16), 0x85ebca6b);
  hash = Math.imul(hash ^ (hash >>> 13), 0xc2b2ae35);
  return (hash ^ (hash >>> 16)) >>> 0;
}
