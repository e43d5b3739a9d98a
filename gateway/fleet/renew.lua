-- A replica says what it holds and what is asked of it, and gets what it may hold until its next call.
--
-- KEYS    members  id -> record: what each replica said last, and what counts as held by it
--         plan     id -> its fair shares; "" -> when that was computed, and sums over all
--         held     what all replicas hold together: "p:" pool, "l:" places, "a:" allowance
--         budgets  pool -> {fence, C of each class, C as configured, ceilings}
--         buckets  allowance -> {level, at, per minute}
--         lead     {id, fence, until when}
--         epoch    {when this life of the store began, until when nobody gets more, when the last lease ends}
-- ARGV    id, a Renewal (messages.py)
-- Answer  a Granted, then the signals of all replicas if they were asked for
--
-- The arithmetic is explained in shares.py and must give the same bits. Time is the server's.

local MEMBERS, PLAN, HELD, BUDGETS, BUCKETS, LEAD, EPOCH =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local FLOOR_PART = 0.02
local KEPT_MS = 600000       -- every key dies by itself
local SETTLE_MS = 500        -- after the store was emptied, or away: until everybody has said what it holds
local CLASS_PARTS = {0.62, 0.33, 0.05}
local TURN_MS = 1000
local FRESH_MS = 2000        -- signals of a replica that has said nothing for longer are old news
local PLAN_MS = 1            -- for each replica: a plan costs as much, so all plans together cost the same

local table_unpack = unpack
local pack, unpack = cmsgpack.pack, cmsgpack.unpack
local floor, max, min = math.floor, math.max, math.min

local time = redis.call('TIME')
local us = tonumber(time[1]) * 1000000 + tonumber(time[2])
local now = floor(us / 1000)
local id, renewal = ARGV[1], unpack(ARGV[2])
local epoch_known, lease_ms, wants_lead, fence_known, wants_signals = renewal[1], renewal[2], renewal[3], renewal[4], renewal[5]
local pools, places, allowances, signals = renewal[6][1], renewal[6][2], renewal[6][3], renewal[6][4]
local helds, limits, untils, levels = renewal[7], renewal[8], renewal[9], renewal[10]

local function sum(numbers)
  local total = 0
  for _, number in ipairs(numbers) do total = total + number end
  return total
end

local function field(key, name)
  local value = redis.call('HGET', key, name)
  return value and unpack(value)
end

local function whole(number) return string.format('%.0f', number) end

-- In the order of the names; false where there is none.
local function fields(key, names)
  local found = {}
  for from = 1, #names, 100 do
    local some = redis.call('HMGET', key, table_unpack(names, from, min(from + 99, #names)))
    for i = 1, #some do found[from + i - 1] = some[i] end
  end
  return found
end

local function set_fields(key, values)
  local arguments = {}
  for name, value in pairs(values) do
    arguments[#arguments + 1], arguments[#arguments + 2] = name, value
    if #arguments == 200 then
      redis.call('HSET', key, table_unpack(arguments))
      arguments = {}
    end
  end
  if #arguments > 0 then redis.call('HSET', key, table_unpack(arguments)) end
end

-- ------------------------------------------------------------------ shares.py

local function between_classes(rates, demands, ceiling_shares, active)
  local capacity, given, spare = sum(rates), {}, nil
  for k, rate in ipairs(rates) do given[k] = min(rate, demands[k]) end
  spare = capacity - sum(given)
  local idle, higher_active = spare, false
  for k, demand in ipairs(demands) do
    local ceiling = higher_active and max(capacity * ceiling_shares[k], rates[k]) or capacity
    local more = max(min(spare, demand - given[k], ceiling - given[k]), 0)
    given[k] = given[k] + more
    spare = spare - more
    higher_active = higher_active or active[k]
  end
  if spare > 0 and idle > 0 then
    for k, rate in ipairs(rates) do given[k] = given[k] + spare * max(rate - demands[k], 0) / idle end
  end
  return given
end

-- flows: arrays of {name, demand, weight}
local function water_filled(total, flows)
  table.sort(flows, function(a, b)
    local x, y = a[2] / a[3], b[2] / b[3]
    if x ~= y then return x < y end
    return a[1] < b[1]
  end)
  local parts, left, weight_left = {}, total, 0
  for _, flow in ipairs(flows) do weight_left = weight_left + flow[3] end
  for _, flow in ipairs(flows) do
    local part = min(flow[2], max(left, 0) * flow[3] / weight_left)
    parts[flow[1]] = part
    left = left - part
    weight_left = weight_left - flow[3]
  end
  return parts
end

local function between_replicas(total, asked)
  local count = #asked
  local evenly = total * FLOOR_PART / count
  local rest = total - evenly * count
  local demands, weights, own, flows_of_all = {}, {}, {}, {}
  for i, flows in ipairs(asked) do
    local demand = 0
    for _, flow in ipairs(flows) do
      demands[flow[1]] = (demands[flow[1]] or 0) + flow[2]
      weights[flow[1]] = max(weights[flow[1]] or 0, flow[3])
      demand = demand + flow[2]
    end
    own[i] = demand
  end
  for name, demand in pairs(demands) do
    if demand > 0 then flows_of_all[#flows_of_all + 1] = {name, demand, weights[name]} end
  end
  local parts = water_filled(rest, flows_of_all)
  local got, shares = {}, {}
  for i, flows in ipairs(asked) do
    local part = 0
    for _, flow in ipairs(flows) do
      if flow[2] > 0 then part = part + parts[flow[1]] * (flow[2] / demands[flow[1]]) end
    end
    got[i] = part
  end
  local left, everything = max(rest - sum(got), 0), sum(own)
  for i, demand in ipairs(own) do
    local by_demand = everything > 0 and demand / everything or 1 / count
    shares[i] = floor(evenly + got[i] + left * (0.5 * by_demand + 0.5 / count))
  end
  return shares
end

local function filled(total, wanted)
  local flows, got = {}, {}
  for i, want in ipairs(wanted) do flows[i] = {string.format('%06d', i - 1), want, 1} end
  local parts = water_filled(total, flows)
  for i = 1, #wanted do got[i] = parts[string.format('%06d', i - 1)] end
  return got
end

local function filled_by_class(limit, by_class)
  local guaranteed, demands, fair = {}, {}, {}
  for i = 1, #by_class do fair[i] = 0 end
  for k, part in ipairs(CLASS_PARTS) do
    guaranteed[k], demands[k] = limit * part, 0
    for _, wanted in ipairs(by_class) do demands[k] = demands[k] + wanted[k] end
  end
  for k, total in ipairs(between_classes(guaranteed, demands, {1, 1, 1}, {false, false, false})) do
    local of_class = {}
    for i, wanted in ipairs(by_class) do of_class[i] = wanted[k] end
    for i, part in ipairs(filled(total, of_class)) do fair[i] = fair[i] + part end
  end
  return fair
end

-- by_class: of each replica, empty where the classes do not matter
local function shared_places(limit, wanted, turn, by_class)
  local count, within, told, got = #wanted, 0, true, {}
  for i, want in ipairs(wanted) do
    within = within + min(want, limit)
    told = told and #by_class[i] > 0
  end
  local fair = told and filled_by_class(limit, by_class) or filled(limit, wanted)
  local spare = floor(max(limit - within, 0) / count)
  for i = 1, count do got[i] = floor(fair[i]) + spare end
  local left = limit - sum(got)
  for pass = 1, 2 do
    for step = 0, count - 1 do
      local i = (turn + step) % count + 1
      if left > 0 and (pass == 2 or got[i] < wanted[i]) then
        got[i] = got[i] + 1
        left = left - 1
      end
    end
  end
  return got
end

local function raised(wanted, held, free)
  local next_ones = {}
  for k, want in ipairs(wanted) do next_ones[k] = min(want, held[k]) end
  local room = free - sum(next_ones)
  for k, want in ipairs(wanted) do
    local more = floor(max(min(want - next_ones[k], room), 0))
    next_ones[k] = next_ones[k] + more
    room = room - more
  end
  return next_ones
end

local function allowance(level, wanted, wanted_by_all, replicas, first, largest, is_first)
  if level <= 0 then return 0 end
  if wanted_by_all <= level then return floor(wanted + (level - wanted_by_all) / replicas) end
  local claim = min(max(level * (first / wanted_by_all), largest), level)
  if is_first then return floor(claim) end
  local others = wanted_by_all - first
  return others > 0 and floor((level - claim) * (wanted / others)) or 0
end

-- ------------------------------------------------------------------ a life of the store

local life = redis.call('GET', EPOCH)
life = life and unpack(life) or {us, 0, 0}
if epoch_known ~= 0 and epoch_known ~= life[1] and now < floor(life[1] / 1000) + SETTLE_MS then
  life[2] = floor(life[1] / 1000) + SETTLE_MS
end
if epoch_known == life[1] and now >= life[3] then life[2] = now + SETTLE_MS end
life[3] = max(life[3], now + lease_ms)
redis.call('SET', EPOCH, pack(life), 'PX', KEPT_MS)
local settling = now < life[2]

-- ------------------------------------------------------------------ who leads

local lead = redis.call('GET', LEAD)
lead = lead and unpack(lead)
if lead and lead[3] <= now then lead = nil end
if lead and lead[1] == id and not wants_lead then
  redis.call('DEL', LEAD)
  lead = nil
elseif wants_lead and not lead then
  lead = {id, max(us, fence_known + 1), 0}
end
local leads = lead and lead[1] == id
if leads then
  lead[3] = now + lease_ms
  redis.call('SET', LEAD, pack(lead), 'PX', lease_ms)
end
local budgets = {}
for i, pool in ipairs(pools) do
  local known = field(BUDGETS, pool[1])
  if not known or (leads and fence_known == lead[2]) then
    known = {leads and fence_known == lead[2] and lead[2] or 0, pool[2], pool[6], pool[3]}
    redis.call('HSET', BUDGETS, pool[1], pack(known))
  end
  budgets[i] = known
end

-- ------------------------------------------------------------------ what the replica said

local former = field(MEMBERS, id) or {0, 0, {}, {}, {}, {}}
local counted, names = {}, {}    -- of this replica, and the order of it
local function count(name, amount)
  counted[name] = amount
  names[#names + 1] = name
end
for i, pool in ipairs(pools) do count('p:' .. pool[1], sum(helds[i])) end
for i, place in ipairs(places) do count('l:' .. place[1], max(limits[i], place[3])) end
local used, available, buckets, bucket_names = {}, {}, {}, {}
for i, bucket in ipairs(allowances) do bucket_names[i] = bucket[1] end
local states = fields(BUCKETS, bucket_names)
for i, bucket in ipairs(allowances) do
  local name, per_minute, state = bucket[1], bucket[2], states[i] and unpack(states[i])
  local level = state and min(state[1] + per_minute * max(now - state[2], 0) / 60000, per_minute)
    or min(levels[i], per_minute)
  local before = former[1] > now and former[6][name]
  if before then level = min(max(level - (bucket[3] - before), -per_minute), per_minute) end
  buckets[name], used[name], available[i] = pack({level, now, per_minute}), bucket[3], level
  count('a:' .. name, max(untils[i] - bucket[3], 0))
end
set_fields(BUCKETS, buckets)
local said = {now + lease_ms, now, renewal[6], signals, counted, used}

-- ------------------------------------------------------------------ what is fair

local function by_pool(records, ids)
  local pools_of_all, order = {}, {}
  for _, member in ipairs(ids) do
    for _, pool in ipairs(records[member][3][1]) do
      if not pools_of_all[pool[1]] then
        pools_of_all[pool[1]] = {}
        order[#order + 1] = pool[1]
      end
      table.insert(pools_of_all[pool[1]], {member, pool})
    end
  end
  return pools_of_all, order
end

local function plan_pool(name, asking, lines, meta)
  local first = asking[1][2]
  local budget = field(BUDGETS, name)
  local rates = budget and budget[2] or first[2]
  local demands, active, asked, askers, actives = {}, {}, {}, {}, {}
  for k = 1, #rates do
    demands[k], active[k], asked[k], askers[k], actives[k] = 0, false, {}, 0, 0
    for i, one in ipairs(asking) do
      local flows, wanted = one[2][5][k], 0
      for _, flow in ipairs(flows) do wanted = wanted + flow[2] end
      demands[k] = demands[k] + wanted
      if wanted > 0 then askers[k] = askers[k] + 1 end
      if one[2][4][k] then active[k], actives[k] = true, actives[k] + 1 end
      asked[k][i] = flows
    end
  end
  local totals = between_classes(rates, demands, budget and budget[4] or first[3], active)
  for k = 1, #rates do
    local shares = between_replicas(totals[k], asked[k])
    for i, one in ipairs(asking) do
      local line = lines[one[1]]
      line.pools[name] = line.pools[name] or {}
      line.pools[name][k] = shares[i]
    end
  end
  meta.pools[name] = {totals, askers, actives}
end

local function plan()
  local stored, records, ids = redis.call('HGETALL', MEMBERS), {}, {}
  for i = 1, #stored, 2 do
    local one = stored[i] ~= id and unpack(stored[i + 1])
    if one and one[1] > now then
      records[stored[i]] = one
      ids[#ids + 1] = stored[i]
    elseif one then
      redis.call('HDEL', MEMBERS, stored[i])
    end
  end
  records[id] = said
  ids[#ids + 1] = id
  table.sort(ids)
  local lines, meta, held = {}, {now, #ids, pools = {}, allowances = {}}, {}
  local wanted_places, asks, turn = {}, {}, floor(now / 100)
  for _, member in ipairs(ids) do
    lines[member] = {pools = {}, places = {}}
    for name, amount in pairs(records[member][5]) do held[name] = (held[name] or 0) + amount end
    for _, place in ipairs(records[member][3][2]) do
      local all = wanted_places[place[1]] or {place[2], {}, {}, {}}
      wanted_places[place[1]] = all
      all[1] = min(all[1], place[2])
      table.insert(all[2], member)
      table.insert(all[3], place[4])
      table.insert(all[4], place[5])
    end
    for _, bucket in ipairs(records[member][3][3]) do
      local all = meta.allowances[bucket[1]] or {0, 0, '', 0, 0}
      meta.allowances[bucket[1]] = all
      all[1], all[2] = all[1] + bucket[4], all[2] + 1
      local asking = asks[bucket[1]] or {}
      asks[bucket[1]] = asking
      if bucket[4] > 0 then table.insert(asking, {member, bucket[4], bucket[5]}) end
    end
  end
  for name, asking in pairs(asks) do
    local first = asking[floor(now / TURN_MS) % max(#asking, 1) + 1]
    for i, told in ipairs(first or {}) do meta.allowances[name][2 + i] = told end
  end
  local pools_of_all, order = by_pool(records, ids)
  for _, name in ipairs(order) do plan_pool(name, pools_of_all[name], lines, meta) end
  for _, name in ipairs(redis.call('HKEYS', BUDGETS)) do
    if not pools_of_all[name] then redis.call('HDEL', BUDGETS, name) end
  end
  for name, all in pairs(wanted_places) do
    for i, share in ipairs(shared_places(all[1], all[3], turn, all[4])) do lines[all[2][i]].places[name] = share end
  end
  local packed = {[''] = pack(meta)}
  for member, line in pairs(lines) do packed[member] = pack(line) end
  redis.call('DEL', PLAN, HELD)
  set_fields(PLAN, packed)
  for name, amount in pairs(held) do held[name] = whole(amount) end
  set_fields(HELD, held)
  return meta, lines[id]
end

local meta, line = field(PLAN, ''), field(PLAN, id)
local known = meta and line and now < meta[1] + PLAN_MS * meta[2]
if known then
  for _, pool in ipairs(pools) do known = known and line.pools[pool[1]] end
  for _, place in ipairs(places) do known = known and line.places[place[1]] end
end
local kept = former[5]    -- what `held` has of this replica
if not known then
  meta, line = plan()
  kept = counted
end

-- ------------------------------------------------------------------ what it gets

local held_by_all = {}
for i, amount in ipairs(fields(HELD, names)) do held_by_all[names[i]] = tonumber(amount or '0') end

local function held_by_others(name)
  return held_by_all[name] - (kept[name] or 0)
end

local granted_pools, granted_places, granted_allowances, accounted = {}, {}, {}, {}
for i, pool in ipairs(pools) do
  local name, held, budget = 'p:' .. pool[1], helds[i], budgets[i]
  local totals, askers, actives = meta.pools[pool[1]][1], meta.pools[pool[1]][2], meta.pools[pool[1]][3]
  local free = sum(budget[2]) - held_by_others(name)
  if settling then free = sum(held) end
  local rates = raised(line.pools[pool[1]], held, free)
  local elsewhere, prospects, own = {}, {}, {}
  for k = 1, #rates do
    local asks = 0
    for _, flow in ipairs(pool[5][k]) do asks = asks + flow[2] end
    elsewhere[k] = actives[k] > (pool[4][k] and 1 or 0)
    local fair = line.pools[pool[1]][k]
    local equal = asks > fair and 0 or floor(totals[k] / max(askers[k] + (asks > 0 and 0 or 1), 1))
    prospects[k] = max(fair, equal)
    own[k] = rates[k]
    if totals[k] > budget[2][k] then own[k] = floor(rates[k] * (budget[2][k] / totals[k])) end
  end
  granted_pools[i] = {pool[1], rates, budget[2], budget[1], elsewhere, prospects, own, budget[3]}
  accounted[name] = max(sum(held), sum(rates))
end
for i, place in ipairs(places) do
  local name, limit = 'l:' .. place[1], place[2]
  local may = min(line.places[place[1]], max(limit - held_by_others(name), 0))
  if settling then may = min(may, limits[i]) end
  granted_places[i] = {place[1], may}
  accounted[name] = max(limits[i], place[3], may)
end
for i, bucket in ipairs(allowances) do
  local name, of_all = 'a:' .. bucket[1], meta.allowances[bucket[1]] or {0, 0, '', 0, 0}
  local level = available[i]
  local fair = allowance(
    level, bucket[4], max(of_all[1], bucket[4]), max(of_all[2], 1), of_all[4], of_all[5], of_all[3] == id
  )
  local may = max(min(fair, floor(level - held_by_others(name))), 0)
  if settling then may = min(may, max(untils[i] - bucket[3], 0)) end
  granted_allowances[i] = {bucket[1], bucket[3] + may, floor(level), 0}
  accounted[name] = max(untils[i] - bucket[3], may, 0)
end
local changed = {}
for _, name in ipairs(names) do
  if kept[name] ~= accounted[name] then changed[name] = whole(held_by_others(name) + accounted[name]) end
end
set_fields(HELD, changed)
for name, amount in pairs(kept) do
  if not accounted[name] then redis.call('HINCRBY', HELD, name, whole(0 - amount)) end
end
said[5] = accounted
redis.call('HSET', MEMBERS, id, pack(said))
for _, key in ipairs(KEYS) do
  if key ~= LEAD and key ~= EPOCH then redis.call('PEXPIRE', key, KEPT_MS) end
end

local answer = {pack({life[1], meta[2], leads and lead[2] or 0, granted_pools, granted_places, granted_allowances})}
if leads and wants_signals then
  for _, value in ipairs(redis.call('HVALS', MEMBERS)) do
    local one = unpack(value)
    if one[2] > now - FRESH_MS and one[4] ~= '' then answer[#answer + 1] = one[4] end
  end
end
return answer
