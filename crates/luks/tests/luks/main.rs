//! Headers, keys and ciphers, beside cryptsetup, QEMU and another implementation of XTS.

mod ciphers;
mod cryptsetup;
mod hostile_luks1;
mod hostile_luks2;
mod qemu;
mod support;
mod torn;
