-- Answers the epochs in the order of the scopes.
local epochs = {}
for _, scope in ipairs(order.scopes) do
  epochs[#epochs + 1] = integer(epoch_of(scope))
end
return epochs
