// Usage: node orders.js publish | node orders.js handle COUNT
import { createClient } from 'redis';

import { consume, publish } from './rsmq.js';

const TOPIC = 'polyglot';
const CUSTOMERS = ['c-42', 'grüß', '주문'];

async function publishOrders(redis) {
  for (const customer of CUSTOMERS) {
    for (const number of [1, 2]) {
      await publish(redis, TOPIC, { customer, number, sender: 'node' }, { key: customer });
    }
  }
}

async function handleOrders(redis, count) {
  const stop = new AbortController();
  const handle = ({ partition, data }) => {
    const { customer, number, sender } = JSON.parse(data);
    console.log(`order ${number} of ${customer} from ${sender} in partition ${partition}`);
    if (--count === 0) stop.abort();
  };
  await consume(redis, TOPIC, 'node', handle, { signal: stop.signal });
}

const url = process.env.RSMQ_URL ?? 'redis://localhost:6379';
const path = url.startsWith('unix://') && decodeURIComponent(new URL(url).pathname);
const redis = await createClient(path ? { socket: { path } } : { url }).connect();
const [command, count] = process.argv.slice(2);
await (command === 'publish' ? publishOrders(redis) : handleOrders(redis, Number(count)));
await redis.close();
