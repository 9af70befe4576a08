require "pg"
db = PG.connect(ENV["DATABASE_URL"])
puts "lost is #{db.exec("SELECT lease_acquire('order:7', 'ruby')").getvalue(0, 0).inspect}"
begin
  db.exec("UPDATE orders SET status = 'late'")
rescue PG::Error => e
  detail = e.result.error_field(PG::Result::PG_DIAG_MESSAGE_DETAIL).include?("orders")
  puts "refused #{e.result.error_field(PG::Result::PG_DIAG_SQLSTATE)} #{detail ? "detail" : "no detail"}"
end
begin
  db.transaction do
    db.exec("UPDATE notes SET text = 'lost'")
    db.exec("SELECT 1 / 0") rescue PG::Error
  end
  puts "commit is silent"
rescue PG::Error
  puts "commit tells"
end
