//! Tests of `src/connection.rs`, within which they are compiled.

use super::*;

#[tokio::test]
async fn servers_are_tried_one_by_one_with_all_that_was_said() {
    let said = "host=a,/tmp,c hostaddr=10.0.0.1,10.0.0.2,10.0.0.3 port=1,2,3 user=me password=x dbname=shop \
                options=-cx=1 application_name=app sslmode=require connect_timeout=3 keepalives=0 \
                target_session_attrs=read-write channel_binding=require tcp_user_timeout=4 \
                keepalives_idle=5 keepalives_interval=6 keepalives_retries=7 sslnegotiation=direct";
    let all: Config = said.parse().unwrap();
    let servers = hosts(&all);
    assert_eq!(place(&servers[0]), "\"a\" (10.0.0.1), port 1, as user \"me\"");
    assert_eq!(place(&servers[1]), "socket \"/tmp/.s.PGSQL.2\" as user \"me\"");
    // Nothing was lost on the way.
    let mut again = without_places(&all);
    for (server, host) in servers.iter().zip(["a", "/tmp", "c"]) {
        again.host(host).hostaddr(server.get_hostaddrs()[0]).port(server.get_ports()[0]);
    }
    assert_eq!(again, all);
}
