//! The conformance suite on a real MySQL 8, and what only MySQL does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dlock::backend::sql::MySql;
use dlock::{Dlock, ErrorKind};
use dlock_testkit::conformance::Suite;
use dlock_testkit::database_servers::MySqlServer;
use dlock_testkit::proxy::Proxy;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance() {
    let Some(server) = MySqlServer::start() else { return };
    let url = format!("{}?migrate=true", server.url());
    Suite::new(move || MySql::new(&url, "test").expect("a backend")).run().await;
}

/// Logs in, and takes a lock.
async fn log_in(url: &str) -> dlock::Result<()> {
    let dlock = Dlock::connect(url).await?;
    dlock.mutex("a").lock().await.map(drop)
}

/// A front for a server whose own TLS is too old for the driver: it speaks TLS with clients that
/// ask for it, and is connected to the socket of the server, which trusts that like TLS. The
/// first connection goes to the port instead, in plain text.
async fn tls_front(server: &MySqlServer) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let key = rcgen::KeyPair::generate().expect("a key");
    let parameters = rcgen::CertificateParams::new(vec!["localhost".to_owned()]);
    let certificate = parameters.expect("parameters").self_signed(&key).expect("a certificate");
    let key = rustls::pki_types::PrivatePkcs8KeyDer::from(key.serialize_der());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key.into())
        .expect("the certificate");
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let (socket, direct) = (server.directory().join("s"), server.port());
    tokio::spawn(async move {
        let mut is_first = true;
        while let Ok((client, _)) = listener.accept().await {
            if std::mem::take(&mut is_first) {
                tokio::spawn(async move {
                    let (mut client, server) = (client, TcpStream::connect(("127.0.0.1", direct)));
                    let mut server = server.await?;
                    tokio::io::copy_bidirectional(&mut client, &mut server).await
                });
                continue;
            }
            let (acceptor, socket) = (acceptor.clone(), socket.clone());
            tokio::spawn(async move { serve(client, socket, acceptor).await });
        }
    });
    port
}

/// The packet of the client with which it asks for TLS.
const ASKS_FOR_TLS: usize = 32;
/// The bit that says so, in the second byte.
const TLS: u8 = 0x08;

async fn serve(
    mut client: TcpStream,
    socket: std::path::PathBuf,
    acceptor: tokio_rustls::TlsAcceptor,
) -> std::io::Result<()> {
    let mut server = UnixStream::connect(socket).await?;
    client.write_all(&packet(&mut server).await?).await?;
    let first = packet(&mut client).await?;
    if first.len() != 4 + ASKS_FOR_TLS {
        server.write_all(&first).await?;
        tokio::io::copy_bidirectional(&mut client, &mut server).await?;
        return Ok(());
    }
    let mut client = acceptor.accept(client).await?;
    // The server has not seen the packet that asked for TLS: the numbers differ by one.
    loop {
        let mut asked = packet(&mut client).await?;
        if asked[3] == 2 {
            asked[5] &= !TLS;
        }
        asked[3] -= 1;
        server.write_all(&asked).await?;
        loop {
            let mut answer = packet(&mut server).await?;
            answer[3] += 1;
            client.write_all(&answer).await?;
            client.flush().await?;
            match answer[4..] {
                [0x00 | 0xff, ..] => {
                    tokio::io::copy_bidirectional(&mut client, &mut server).await?;
                    return Ok(());
                }
                [0x01, 0x03, ..] => {} // the password is known; another packet follows
                _ => break,
            }
        }
    }
}

async fn packet(from: &mut (impl AsyncRead + Unpin)) -> std::io::Result<Vec<u8>> {
    let mut packet = vec![0; 4];
    from.read_exact(&mut packet).await?;
    let length = u32::from_le_bytes([packet[0], packet[1], packet[2], 0]);
    packet.resize(4 + length as usize, 0);
    from.read_exact(&mut packet[4..]).await?;
    Ok(packet)
}

/// The default account of MySQL 8 (`caching_sha2_password`) logs in at a server of this machine
/// without any option. What cannot work is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_default_account_logs_in() {
    let Some(server) = MySqlServer::start() else { return };
    server.sql("CREATE USER shop IDENTIFIED BY 'right'; GRANT ALL ON dlock.* TO shop");
    let plugin = "SELECT plugin FROM mysql.user WHERE user = 'shop'";
    assert_eq!(server.sql(plugin), "caching_sha2_password");
    let url = server.url().replace("root@", "shop:right@");
    // Without TLS on both sides, or with TLS that is too old.
    for option in ["?sslmode=disable", ""] {
        let error = log_in(&format!("{url}{option}")).await.expect_err("in plain text");
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("over TLS only"), "{error}");
    }
    let front = |url: &str, port| url.replace(&server.port().to_string(), &format!("{port}"));
    let wrong = front(&url.replace("right", "secret"), tls_front(&server).await);
    let error = log_in(&wrong).await.expect_err("a wrong password");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert!(!error.to_string().contains("secret"), "{error}");
    let front = front(&url, tls_front(&server).await);
    log_in(&format!("{front}?migrate=true")).await.expect("TLS that the URL does not name");
    // From now on the server knows the password, and takes a proof of it in plain text.
    log_in(&url).await.expect("without TLS");
}

/// A client that is cut off in the middle of a transaction does not keep its rows: the server
/// ends the transaction after the time of a call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_transaction_ends() {
    let Some(server) = MySqlServer::start() else { return };
    let proxy = Proxy::opaque(server.port());
    let url = format!("{}?migrate=true", server.url());
    let direct = Dlock::connect(&url).await.expect("a client");
    drop(direct.mutex("a").lock().await.expect("the lock"));
    let behind = url.replace(&format!(":{}/", server.port()), &format!(":{}/", proxy.port()));
    let through = Dlock::connect(&behind).await.expect("a client");
    let done = Arc::new(AtomicBool::new(false));
    let busy = tokio::spawn({
        let (lock, done) = (through.mutex("a").fair(), done.clone());
        async move {
            while !done.load(Ordering::Relaxed) {
                let _ = lock.lock().await;
            }
        }
    });
    let open = "SELECT count(*) FROM information_schema.innodb_trx";
    let mut caught = false;
    for _ in 0..50 {
        proxy.freeze();
        tokio::time::sleep(Duration::from_millis(100)).await;
        caught = server.sql(open) != "0";
        if caught {
            break;
        }
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    assert!(caught, "no transaction was open when the network froze");
    proxy.go_silent();
    done.store(true, Ordering::Relaxed);
    let began = Instant::now();
    while server.sql(open) != "0" {
        assert!(began.elapsed() < Duration::from_secs(6), "the transaction stays open");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_ne!(server.sql("SELECT @@GLOBAL.wait_timeout"), "2");
    busy.abort();
}
