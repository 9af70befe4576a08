# Rails on a table of work, with the mapping of docs/recipes/work-table.md: it saves a run that it has claimed, one that was swept up
# since, and one that was claimed since. It fails where something else comes of it than the page says.

require 'active_record'

port, database = ARGV
ActiveRecord::Base.establish_connection(
  adapter: 'postgresql', host: '127.0.0.1', port: port, database: database, username: 'postgres'
)

class Run < ActiveRecord::Base
  self.locking_column = 'none'
  before_update { fence_will_change! }
end

def ask(sql)
  ActiveRecord::Base.connection.select_value(sql)
end

def claim
  ask("UPDATE runs SET state = 'running', held_until = clock_timestamp() + '1 h' WHERE id = 1 RETURNING fence")
end

def give_up(token)
  ask("UPDATE runs SET state = 'ready', held_until = NULL, fence = #{token} WHERE id = 1 RETURNING id")
end

def comes(run, what, wanted)
  came = begin
    run.update!(result: what)
    'done'
  rescue ActiveRecord::StatementInvalid => error
    error.cause.result.error_field(PG::PG_DIAG_SQLSTATE)
  end
  raise "#{what}: #{came}, not #{wanted}" unless came == wanted
end

token = claim
run, swept_up, older = Array.new(3) { Run.find(1) }
comes(run, 'holds it', 'done')
comes(run, 'writes again', 'done')
give_up(token)
comes(swept_up, 'swept up', 'PF004')
claim
comes(older, 'claimed since', 'PF001')
raise 'another result' unless ask('SELECT result FROM runs WHERE id = 1') == 'writes again'
