/** rsmq's wire format for Node.js: all of docs/wire-format.md that a publisher and a consumer need. */
import { randomUUID } from 'node:crypto';

import { murmur3 } from './murmur3.js';

const PREFIX = process.env.RSMQ_PREFIX || 'rsmq';
const streamOf = (topic, partition) => `${PREFIX}:{${topic}.${partition}}`;

async function partitionsOf(redis, topic) {
  const count = await redis.hGet(`${PREFIX}:topic:{${topic}}`, 'partitions');
  if (!count) throw new Error(`there is no topic ${topic} yet: start its Python worker, or publish once from Python`);
  if (!/^\d+$/.test(count)) {
    throw new Error(`topic ${topic} has "${count}" instead of a number of partitions: a newer rsmq has changed it, stop`);
  }
  return Number(count);
}

/** Store one message as JSON. Messages of one key are handled in the order in which they were stored. */
export async function publish(redis, topic, payload, { key, headers } = {}) {
  const id = randomUUID();
  const partition = murmur3(Buffer.from(key ?? id)) % (await partitionsOf(redis, topic));
  const fields = { data: JSON.stringify(payload), id };
  if (key !== undefined) fields.key = key;
  if (headers) fields.h = JSON.stringify(headers);
  await redis.xAdd(streamOf(topic, partition), '*', fields);
  return id;
}

/**
 * Give every message of the topic to `handle({ partition, data, key, id, ... })`, in a group of this program's own,
 * until `signal` aborts. A message is acknowledged when `handle` has returned; what an earlier run left comes first.
 */
export async function consume(redis, topic, group, handle, { consumer = 'node', signal } = {}) {
  const streams = Array.from({ length: await partitionsOf(redis, topic) }, (_, partition) => streamOf(topic, partition));
  await Promise.all(streams.map((stream) => joinGroup(redis, stream, group)));
  let position = '0'; // what this consumer has read and not acknowledged; '>' is what no consumer of the group has read
  while (!signal?.aborted) {
    const positions = streams.map((key) => ({ key, id: position }));
    const replies = (await redis.xReadGroup(group, consumer, positions, { COUNT: 100, BLOCK: 1000 })) ?? [];
    const entries = replies.flatMap(({ name, messages }) => messages.map((entry) => ({ stream: name, ...entry })));
    if (entries.length === 0) position = '>';
    for (const { stream, id, message } of entries) {
      if (signal?.aborted) return;
      const isOurs = message?.data !== undefined && (message.group ?? group) === group;
      if (isOurs) await handle({ id, ...message, partition: streams.indexOf(stream) });
      await redis.xAck(stream, group, id);
    }
  }
}

async function joinGroup(redis, stream, group) {
  try {
    await redis.xGroupCreate(stream, group, '0', { MKSTREAM: true });
  } catch (error) {
    if (!error.message.startsWith('BUSYGROUP')) throw error; // it exists, and keeps its place
  }
}
