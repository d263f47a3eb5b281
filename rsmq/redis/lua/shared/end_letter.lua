-- a letter with an expiry of its own: its stamp, when it expires (as text), and whether it has expired already
local function end_letter(stamp, ttl, now, latest)
  local ends = math.min(struct.unpack('>I6', stamp, 2) + ttl, latest)
  return stamp:sub(1, 7) .. struct.pack('>I6', math.max(ends, 0)), string.format('%.0f', ends), ends <= now
end
