//! A network that loses the answer to a commit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// Forwards connections to a PostgreSQL server. While `cut` is set, the next connection that
/// sends COMMIT is cut: the server gets it, and the client hears nothing. Returns the port.
///
/// # Panics
/// If there is no free port.
pub async fn cut_at_commit(server: u16, cut: Arc<AtomicBool>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("it").port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let Ok(server) = TcpStream::connect(("127.0.0.1", server)).await else { continue };
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = server.into_split();
            let cut = cut.clone();
            let back = tokio::spawn(async move {
                let _ = tokio::io::copy(&mut from_server, &mut to_client).await;
            });
            tokio::spawn(async move {
                let mut buffer = [0; 65_536];
                while let Ok(count @ 1..) = from_client.read(&mut buffer).await {
                    // With the end of the statement: BEGIN has READ COMMITTED in it.
                    let commit = buffer[..count].windows(7).any(|part| part == b"COMMIT\0");
                    if commit && cut.swap(false, Ordering::SeqCst) {
                        back.abort(); // the client hears nothing any more
                        let _ = to_server.write_all(&buffer[..count]).await;
                        tokio::time::sleep(Duration::from_millis(300)).await;
                        return;
                    }
                    if to_server.write_all(&buffer[..count]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}
