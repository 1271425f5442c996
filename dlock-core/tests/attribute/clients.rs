//! The client of an annotated function, and the crate that it is found in.

use std::sync::Arc;

use dlock::{Dlock, ErrorKind, Result, distributed_lock, global, testing};

#[distributed_lock(key = "default", wait = "0s")]
async fn by_default() -> Result<()> {
    Ok(())
}

#[tokio::test]
async fn the_client_is_the_scoped_one_else_none() {
    let error = by_default().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoClient);
    assert!(error.to_string().contains("dlock::init"), "{error}");
    testing::scope(async {
        by_default().await.unwrap();
        let busy = testing::force_busy("default").await.unwrap();
        assert_eq!(by_default().await.unwrap_err().kind(), ErrorKind::TimedOut);
        drop(busy);
        assert!(global().is_ok());
    })
    .await;
}

struct Holder<C> {
    client: C,
}

impl Holder<Arc<Dlock>> {
    #[distributed_lock(key = "c", client = self.client)]
    async fn shared(&self) -> Result<()> {
        Ok(())
    }
}

impl Holder<Dlock> {
    #[distributed_lock(key = "c", client = &self.client)]
    async fn borrowed(&self) -> Result<()> {
        Ok(())
    }

    #[distributed_lock(key = "c", client = self.made().await)]
    async fn computed(&self) -> Result<()> {
        Ok(())
    }

    async fn made(&self) -> Dlock {
        self.client.clone()
    }
}

mod facade {
    pub(crate) use ::dlock;
}

#[distributed_lock(crate = facade::dlock, key = "c{n}", client = client)]
async fn by_path(client: &Dlock, n: u32) -> Result<()> {
    Ok(())
}

#[distributed_lock(crate = "crate::clients::facade::dlock", key = "c{n}", client = client)]
async fn by_text(client: &Dlock, n: u32) -> Result<()> {
    Ok(())
}

#[tokio::test]
async fn whatever_gives_a_client() {
    let dlock = testing::client();
    by_path(&dlock, 1).await.unwrap();
    by_text(&dlock, 1).await.unwrap();
    let holder = Holder { client: dlock.clone() };
    holder.borrowed().await.unwrap();
    holder.computed().await.unwrap();
    Holder { client: Arc::new(dlock) }.shared().await.unwrap();
}
