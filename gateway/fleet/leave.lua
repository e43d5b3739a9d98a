-- A replica leaves: what it held is free at once, and so is the lead.
-- KEYS members, plan, held, budgets, buckets, lead, epoch as in renew.lua; ARGV id

local record = redis.call('HGET', KEYS[1], ARGV[1])
if not record then return 0 end
for name, amount in pairs(cmsgpack.unpack(record)[5]) do
  redis.call('HINCRBY', KEYS[3], name, string.format('%.0f', 0 - amount))
end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1], '')
local lead = redis.call('GET', KEYS[6])
if lead and cmsgpack.unpack(lead)[1] == ARGV[1] then redis.call('DEL', KEYS[6]) end
return 1
