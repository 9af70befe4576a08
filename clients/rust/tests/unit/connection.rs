//! Tests of `src/connection.rs`, compiled within it.

use super::*;

#[tokio::test]
async fn each_server_is_tried_with_all_settings() {
    let settings = "host=a,/tmp,c hostaddr=10.0.0.1,10.0.0.2,10.0.0.3 port=1,2,3 user=me password=x dbname=shop \
                options=-cx=1 application_name=app sslmode=require connect_timeout=3 keepalives=0 \
                target_session_attrs=read-write channel_binding=require tcp_user_timeout=4 \
                keepalives_idle=5 keepalives_interval=6 keepalives_retries=7 sslnegotiation=direct";
    let all: Config = settings.parse().unwrap();
    let servers = each_host(&all);
    assert_eq!(description(&servers[0]), "\"a\" (10.0.0.1), port 1, as user \"me\"");
    assert_eq!(description(&servers[1]), "socket \"/tmp/.s.PGSQL.2\" as user \"me\"");
    // No setting is lost: together with the servers they are the original config.
    let mut again = without_servers(&all);
    for (server, host) in servers.iter().zip(["a", "/tmp", "c"]) {
        again.host(host).hostaddr(server.get_hostaddrs()[0]).port(server.get_ports()[0]);
    }
    assert_eq!(again, all);
}
