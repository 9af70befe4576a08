package require tdbc::postgres
tdbc::postgres::connection create db -host 127.0.0.1 -port $env(PGPORT) -database postgres -user app
set lost [lindex [db allrows -as lists "SELECT lease_acquire('order:7', 'tcl')"] 0]
puts "lost is '[lindex $lost 0]'"
if {[catch {db allrows "UPDATE orders SET status = 'late'"} text]} {
    puts "refused [lindex $errorCode 2] [expr {[string match *orders* $text] ? {detail} : {no detail}}]"
}
db begintransaction
db allrows "UPDATE notes SET text = 'lost'"
catch {db allrows "SELECT 1 / 0"}
puts "commit [expr {[catch {db commit}] ? {tells} : {is silent}}]"
